"""Repeated creates: the same idempotency key and the same body are the same request."""

import msgspec


class IdempotencyKeyReused(Exception):
    """This Idempotency-Key was used with another body before: use a new key."""

    def __init__(self, uuid: str) -> None:
        super().__init__(uuid)
        self.uuid = uuid  # of the request that was stored with the key


class IdempotencyKeyInFlight(Exception):
    """A request with this Idempotency-Key is still being stored: send it again later."""


class Idempotency(msgspec.Struct, frozen=True):
    """What identifies a repeat: the caller's key and the SHA-256 of the body.

    A create whose key is in use waits for the other one, up to *wait_seconds*.
    """

    key: str
    sha256: bytes
    wait_seconds: float
