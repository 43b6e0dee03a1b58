"""A real OAuth 2.0 authorization server: npm's oidc-provider, which has the OpenID Foundation's certificates.

With PyPI's Authlib, the tests would have to bring the endpoints, and the publication of the keys, themselves.
"""

import json
import shutil
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from msgspec.structs import replace

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import accepts, free_port
from service.settings import ServiceSettings
from tests.harness.certificates import Authority
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import Process, bare_environment, started
from tests.harness.waiting import eventually

_NODE_MODULES = CHECKOUT / ".local" / "node" / "node_modules"
_RESOURCE = "https://calculations.example.com"  # RFC 8707 asks for a URI
_SECRET = "hunter2"  # of the only client, CONVEYANCER


class AuthorizationServer:
    """oidc-provider as a process, with one signing key at a time."""

    def __init__(self, authority: Authority, folder: Path) -> None:
        node = shutil.which("node")
        if node is None or not (_NODE_MODULES / "oidc-provider").exists():
            pytest.skip("oidc-provider is not installed: `make test-long` installs it if there is node")
        self._trust = ssl.create_default_context(cafile=authority.file)
        port = free_port()
        self._keys = folder / "keys.json"
        self._make_key()
        files = Path(__file__).with_suffix(".cjs"), str(port), authority.certificate(), self._keys
        command: list[str | Path] = [node, *files, _RESOURCE, CONVEYANCER, _SECRET]
        environment = bare_environment(NODE_PATH=str(_NODE_MODULES))
        self.process = Process("oidc-provider", command, environment=environment, port=port, folder=folder)
        self._client: httpx.AsyncClient

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        self._client = httpx.AsyncClient(
            base_url=f"https://127.0.0.1:{self.process.port}",
            auth=(CONVEYANCER, _SECRET),
            verify=self._trust,
            timeout=30.0,
        )
        async with self._client, started(self.process, ready=False):
            await eventually(lambda: accepts(self.process.port))
            yield

    async def settings(self, settings: ServiceSettings) -> ServiceSettings:
        """Return *settings*, of an API that trusts this server as its metadata say."""
        metadata = (await self._client.get("/.well-known/openid-configuration")).json()
        issuer, keys = metadata["issuer"], metadata["jwks_uri"]
        return replace(settings, auth_issuer=issuer, auth_jwks_url=keys, auth_audience=_RESOURCE)

    async def token(self, *, scope: str = "request:read request:write", is_opaque: bool = False) -> str:
        """Return a new access token of CONVEYANCER, by the client-credentials grant."""
        form = {"grant_type": "client_credentials", "scope": scope}
        form |= {} if is_opaque else {"resource": _RESOURCE}
        response = await self._client.post("/token", data=form)
        assert response.status_code == 200, response.text
        return response.json()["access_token"]

    async def rotate(self) -> None:
        """Replace the signing key, and wait until only the new one is published."""
        before = await self._published()
        self._make_key()
        self.process.running.send_signal(signal.SIGHUP)
        await eventually(lambda: self._has_replaced(before))

    async def _has_replaced(self, before: bytes) -> bool:
        return await self._published() != before

    async def _published(self) -> bytes:
        return (await self._client.get("/jwks")).content

    def _make_key(self) -> None:
        key = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()), as_dict=True)
        self._keys.write_text(json.dumps({"keys": [{**key, "use": "sig", "alg": "ES256"}]}))
