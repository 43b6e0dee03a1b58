"""What the writing side of the outbox needs: the events, and the wake-up of the relays."""
