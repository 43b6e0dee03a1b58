"""The consumers of RabbitMQ queues: notifications and calculation results."""
