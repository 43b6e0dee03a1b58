"""Runs an ASGI application until SIGTERM, with probes and background work. Both processes use it."""
