"""Derives the secret of a request from a salt, and codes of e-mails. storing.py makes the salt."""

import base64
import hmac
import re
from uuid import UUID

import msgspec

from service.postgres.pool import Connection
from service.settings import InvalidSetting
from service.telemetry import metrics

_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")


class SecretKeyMissing(Exception):
    """The secret of this request is unavailable: its key is missing. Try again later."""


class WrongSecret(Exception):
    """This secret does not open this request, or there is no such request."""


class SecretKeyRing(msgspec.Struct, frozen=True):
    """Keys by id. New requests use the current key. Earlier secrets stay valid while their key is listed."""

    current_id: str
    # A keyed object is copied: hmac.digest takes 1.6 times as long, and lets other threads interrupt.
    keys: dict[str, hmac.HMAC]

    @classmethod
    def parse(cls, text: str) -> "SecretKeyRing":
        """Read `id:key,id:key,…`, the current key first. Raises InvalidSetting, without showing a key.

        A key is at least 32 bytes, encoded in URL-safe base64.
        """
        pairs = [entry.strip().partition(":") for entry in text.split(",")]
        keys = {key_id: hmac.new(_decode_key(encoded), digestmod="sha256") for key_id, _, encoded in pairs}
        if "" in keys or len(keys) < len(pairs):
            raise InvalidSetting(
                "REQUEST_SECRET_KEYS: every key needs an id of its own, as in `id:key,id:key`"
            )
        return cls(current_id=pairs[0][0], keys=keys)

    @property
    def fingerprints(self) -> dict[str, bytes]:
        """A fingerprint of each key by id, which reveals nothing else."""
        return {key_id: self._digest(key_id, b"fingerprint") for key_id in self.keys}

    def secret(self, request_id: UUID, *, salt: bytes, key_id: str) -> str:
        """Derive the secret of a request, 43 URL-safe characters. Raises SecretKeyMissing."""
        if key_id not in self.keys:
            metrics.secret_keys_missing.inc()
            raise SecretKeyMissing
        digest = self._digest(key_id, salt + request_id.bytes)
        return _encode(digest)

    def email_code(self, email_key: str, *, key_id: str) -> str:
        """Derive a code that authenticates the key of an e-mail, 22 URL-safe characters."""
        # The prefix makes the message longer than that of any secret, so neither is ever the other.
        return _encode(self._digest(key_id, f"e-mail {email_key}".encode())[:16])

    def _digest(self, key_id: str, message: bytes) -> bytes:
        keyed = self.keys[key_id].copy()
        keyed.update(message)
        return keyed.digest()


async def remember_keys(connection: Connection, ring: SecretKeyRing) -> list[str]:
    """Store the fingerprint of each key whose id is new. Return the ids that had another key before."""
    keys = ring.fingerprints
    await connection.execute(
        """
        INSERT INTO secret_key (id, fingerprint)
        SELECT *
          FROM unnest($1::text[], $2::bytea[])
            ON CONFLICT (id) DO NOTHING
        """,
        list(keys),
        list(keys.values()),
    )
    return await find_other_keys(connection, ring)


async def find_other_keys(connection: Connection, ring: SecretKeyRing) -> list[str]:
    """Return the ids that had another key before."""
    keys = ring.fingerprints
    rows = await connection.fetch("SELECT id, fingerprint FROM secret_key ORDER BY id")
    return [row["id"] for row in rows if keys.get(row["id"], row["fingerprint"]) != row["fingerprint"]]


def looks_like_secret(text: str) -> bool:
    """Whether *text* has the form of a secret, which no access token and no API key has."""
    return _SECRET.fullmatch(text) is not None


def _encode(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _decode_key(encoded: str) -> bytes:
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except ValueError:
        key = b""
    if len(key) < 32:
        raise InvalidSetting("REQUEST_SECRET_KEYS: a key must be 32 bytes or more, as URL-safe base64")
    return key
