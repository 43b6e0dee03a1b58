"""Derives the secret of a request from a salt, and codes of e-mails. storing.py makes the salt."""

import base64
import hmac
import re
from uuid import UUID

import msgspec

from service.settings import InvalidSetting
from service.telemetry import metrics

_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")


class SecretKeyMissing(Exception):
    """The secret of this request is unavailable until an operator restores its key: try again later."""


class WrongSecret(Exception):
    """This secret does not open this request, or there is no such request."""


class SecretKeyRing(msgspec.Struct, frozen=True):
    """Keys by id. New requests use the current key. Earlier secrets stay valid while their key is listed.

    An id is the key's name in the setting and a fingerprint of the key, which reveals nothing else. So if
    another key gets the name, requests lack their key, and get no secret that opens nothing.
    """

    current_id: str
    # A keyed object is copied: hmac.digest takes 1.6 times as long, and lets other threads interrupt.
    keys: dict[str, hmac.HMAC]

    @classmethod
    def parse(cls, text: str) -> "SecretKeyRing":
        """Read `id:key,id:key,…`, the current key first, each of 32 bytes or more in URL-safe base64.

        Raises InvalidSetting, without showing a key.
        """
        pairs = [entry.strip().partition(":") for entry in text.split(",")]
        named = {name: hmac.new(_decode_key(encoded), digestmod="sha256") for name, _, encoded in pairs}
        if "" in named or len(named) < len(pairs):
            raise InvalidSetting(
                "REQUEST_SECRET_KEYS: every key needs an id of its own, as in `id:key,id:key`"
            )
        keys = {f"{name}.{_digest(key, b'fingerprint').hex()[:8]}": key for name, key in named.items()}
        return cls(current_id=next(iter(keys)), keys=keys)

    def secret(self, request_id: UUID, *, salt: bytes, key_id: str) -> str:
        """Derive the secret of a request, 43 URL-safe characters. Raises SecretKeyMissing."""
        if key_id not in self.keys:
            metrics.secret_keys_missing.inc()
            raise SecretKeyMissing
        return _encode(_digest(self.keys[key_id], salt + request_id.bytes))

    def email_code(self, email_key: str, *, key_id: str) -> str:
        """Derive a code that authenticates the key of an e-mail, 22 URL-safe characters."""
        # The prefix makes the message longer than that of any secret, so neither is ever the other.
        return _encode(_digest(self.keys[key_id], f"e-mail {email_key}".encode())[:16])


def looks_like_secret(text: str) -> bool:
    """Whether *text* has the form of a secret, which no access token and no API key has."""
    return _SECRET.fullmatch(text) is not None


def _digest(key: hmac.HMAC, message: bytes) -> bytes:
    keyed = key.copy()
    keyed.update(message)
    return keyed.digest()


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
