"""Finds requests, events and e-mails that do not add up, and exports their numbers."""
