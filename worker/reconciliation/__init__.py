"""Finds requests, events and e-mails that do not add up."""
