"""The commands of operators: `python -m worker COMMAND`, one file each."""
