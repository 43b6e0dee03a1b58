"""Connections to Postgres, and its schema."""
