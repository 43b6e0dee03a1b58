"""The kept events, the queue that points to them, and how relays are woken. A change writes both."""
