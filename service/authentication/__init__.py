"""From an Authorization header to the caller. Knows no web framework."""
