"""Outbox to RabbitMQ."""
