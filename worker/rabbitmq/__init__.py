"""Connections to RabbitMQ and its topology, for the relay, the consumers and the operator commands."""
