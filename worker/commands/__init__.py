"""The operator commands of `python -m worker`."""
