"""What writing to the outbox takes. calculation_requests/storing.py has the statements that write it."""
