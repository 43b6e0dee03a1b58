"""Publishes the outbox to RabbitMQ."""
