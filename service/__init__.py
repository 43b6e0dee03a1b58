"""The HTTP API, and what both processes share: the tables, the events, the settings."""

VERSION = "0.1.0"
