"""The outbox: its events, its lanes, and how relays are woken. The code of a change writes its event."""
