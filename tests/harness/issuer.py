"""An OAuth 2.0 issuer that signs access tokens, and its key server: over HTTPS, and with faults."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from service.settings import ServiceSettings
from tests.harness.certificates import Authority
from tests.harness.examples import CONVEYANCER, SECRET_KEYS
from tests.harness.loopback_server import Answer, AnsweringServer, http_answer

ISSUER = "https://issuer.test"
AUDIENCE = "calculation-requests"


class Issuer:
    def __init__(self, folder: Path) -> None:
        self.key: EllipticCurvePrivateKey = ec.generate_private_key(ec.SECP256R1())
        self.jwks = folder / "jwks.json"
        self.publish("local")

    def publish(self, key_id: str) -> None:
        """Write the JWK set, with the key under this id."""
        jwk = jwt.algorithms.ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True)
        self.jwks.write_text(json.dumps({"keys": [{**jwk, "kid": key_id, "use": "sig", "alg": "ES256"}]}))

    def token(
        self, client_id: str | None = CONVEYANCER, *, headers: dict[str, Any] | None = None, **claims: Any
    ) -> str:
        """Return a token, valid unless *claims* or *headers* say otherwise. A claim of None is left out."""
        usual = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "client_id": client_id,
            "scope": "request:read request:write",
            "exp": int(time.time()) + 600,
        }
        every = {name: value for name, value in (usual | claims).items() if value is not None}
        head = {"typ": "at+jwt", "kid": "local"} | (headers or {})
        return jwt.encode(every, self.key, algorithm="ES256", headers=head)


def api_settings(database_url: str, issuer: Issuer) -> ServiceSettings:
    """Return the settings of an API that trusts *issuer*, and gives a slow machine's Postgres time."""
    return ServiceSettings(
        database_url=database_url,
        database_timeout_seconds=10.0,
        app_url="https://app.example.com",
        request_secret_keys=SECRET_KEYS,
        auth_issuer=ISSUER,
        auth_audience=AUDIENCE,
        auth_jwks_url=issuer.jwks.as_uri(),
    )


class HttpsIssuer(AnsweringServer):
    def __init__(self, authority: Authority, *, address: str = "127.0.0.1") -> None:
        super().__init__(status(503), authority.server_context(address=address))
        self.url = f"https://127.0.0.1:{self.port}/jwks.json"


def status(code: int, body: bytes = b"", *headers: str) -> bytes:
    return http_answer(f"{code} Status", body, *headers)


def endless(header: bytes, piece: bytes, pause_seconds: float = 0.0) -> Answer:
    async def answer_without_end(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n" + header + b"\r\n\r\n")
        while not writer.is_closing():
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_seconds)

    return answer_without_end
