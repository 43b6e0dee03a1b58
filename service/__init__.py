"""The HTTP API, and the code that both processes share: tables, events and settings."""

VERSION = "0.1.0"
