"""Writing to the outbox: the events, their lanes, and waking the relays."""
