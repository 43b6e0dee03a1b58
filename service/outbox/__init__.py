"""The outbox: its events, its lanes, and how relays are woken. Rows are written where changes are made."""
