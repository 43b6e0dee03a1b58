"""Turns an Authorization header into a caller. Independent of the web framework."""
