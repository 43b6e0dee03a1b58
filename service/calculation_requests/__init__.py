"""The resource: its rows, its SQL and its rules; storing.py writes each row together with its event."""
