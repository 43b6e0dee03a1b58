"""What operators can do with `python -m worker`."""
