"""Which creates are repeats: the same idempotency key, and the same body."""

import msgspec


class IdempotencyKeyReused(Exception):
    """This Idempotency-Key came with another body before."""


class IdempotencyKeyInFlight(Exception):
    """A request with this Idempotency-Key is being stored: ask again."""


class Idempotency(msgspec.Struct, frozen=True):
    """What tells a repeat from another request: the caller's key, and the SHA-256 of what was submitted."""

    key: str
    sha256: bytes
    wait_seconds: float  # for a request with the same key that is being stored

    @property
    def lock_timeout(self) -> str:
        """The wait as Postgres writes it; zero would be for ever."""
        return f"{max(1, round(self.wait_seconds * 1000))}ms"
