"""The HTTP API: endpoints, bodies, parameters, responses and errors."""
