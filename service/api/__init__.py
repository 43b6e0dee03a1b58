"""The HTTP API: endpoints, bodies and parameters, answers and errors."""
