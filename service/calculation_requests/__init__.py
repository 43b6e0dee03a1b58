"""The resource: its rows, its SQL and its rules."""
