"""From RabbitMQ: notifications and calculations."""
