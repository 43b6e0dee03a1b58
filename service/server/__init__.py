"""Runs an ASGI application until SIGTERM, with probes and background work, for both processes."""
