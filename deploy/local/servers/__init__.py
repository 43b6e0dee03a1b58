"""Postgres and RabbitMQ for development and tests: given by URL, in a container, or as a process here."""
