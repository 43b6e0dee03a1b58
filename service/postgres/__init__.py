"""Connections to Postgres, and the versions of the schema."""
