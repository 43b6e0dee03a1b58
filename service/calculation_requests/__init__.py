"""Calculation requests: rows, SQL, rules. storing.py writes; reading.py selects what a reader may see."""
