"""Calculation requests: rows, SQL and rules. storing.py writes each row together with its event."""
