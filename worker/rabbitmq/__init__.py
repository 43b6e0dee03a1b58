"""Connections to RabbitMQ, and the topology."""
