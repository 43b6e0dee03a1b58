"""A real authorization server, over HTTPS with a private authority: its tokens, and a rotation of its key.

It is npm's oidc-provider, which has the OpenID Foundation's certificates. With PyPI's Authlib, the test would
have to bring the endpoints, and the publication of the keys, itself.
"""

import json
import shutil
import signal
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from msgspec.structs import replace

from deploy.local.machine.folders import LOCAL
from deploy.local.machine.ports import accepts, free_port
from tests.harness.examples import A_REQUEST, CONVEYANCER, STRUCTURE
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.harness.processes import Process, bare_environment, started
from tests.harness.waiting import eventually

_NODE_MODULES = LOCAL / "node" / "node_modules"
_RESOURCE = "https://calculations.example.com"  # RFC 8707 asks for a URI
_SECRET = "hunter2"  # of the only client, CONVEYANCER


def write_key(file: Path) -> None:
    key = ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()), as_dict=True)
    file.write_text(json.dumps({"keys": [{**key, "use": "sig", "alg": "ES256"}]}))


@pytest.fixture
def provider(authority, tmp_path):
    """The server, not yet started. Its keys are in keys.json."""
    node, port = shutil.which("node"), free_port()
    if node is None or not (_NODE_MODULES / "oidc-provider").exists():
        pytest.skip("oidc-provider is not installed: `make test-long` installs it if there is node")
    write_key(tmp_path / "keys.json")
    program = Path(__file__).with_name("authorization_server.cjs")
    files = program, str(port), authority.certificate(), tmp_path / "keys.json"
    environment = bare_environment(NODE_PATH=str(_NODE_MODULES))
    command = [node, *files, _RESOURCE, CONVEYANCER, _SECRET]
    return Process("oidc-provider", command, environment=environment, port=port, folder=tmp_path)


@pytest.mark.long
async def test_token_opens_what_its_scopes_allow_also_after_a_rotation_and_an_opaque_one_gets_401(
    provider, authority, service_settings, tmp_path
):
    url, trust = f"https://127.0.0.1:{provider.port}", ssl.create_default_context(cafile=authority.file)
    server = httpx.AsyncClient(base_url=url, auth=(CONVEYANCER, _SECRET), verify=trust, timeout=30.0)

    async def token(**form: str) -> str:
        """Return a new access token of CONVEYANCER, by the client-credentials grant."""
        response = await server.post("/token", data={"grant_type": "client_credentials", **form})
        assert response.status_code == 200, response.text
        return str(response.json()["access_token"])

    async def answers_to(**form: str) -> list[httpx.Response]:
        client.headers.update(bearer(await token(**form)))
        create = await client.post("/v1/request", json=A_REQUEST)
        return [create, await client.get("/v1/request"), await client.get(STRUCTURE)]

    async def new_key_is_accepted() -> bool:
        if (await server.get("/jwks")).content == published:
            return False
        client.headers.update(bearer(await token(resource=_RESOURCE, scope="request:read")))
        return bool((await client.get("/v1/request")).is_success)

    async with server, started(provider, ready=False):
        await eventually(lambda: accepts(provider.port))
        metadata: dict[str, Any] = (await server.get("/.well-known/openid-configuration")).json()
        settings = replace(
            service_settings,
            auth_issuer=metadata["issuer"],
            auth_jwks_url=metadata["jwks_uri"],
            auth_audience=_RESOURCE,
        )
        async with api_client(settings, None) as client:
            reading, writing = [
                await answers_to(resource=_RESOURCE, scope=f"request:{name}") for name in ("read", "write")
            ]
            opaque = await answers_to(scope="request:read")
            published = (await server.get("/jwks")).content
            write_key(tmp_path / "keys.json")
            provider.running.send_signal(signal.SIGHUP)
            await eventually(new_key_is_accepted)

    statuses = [[each.status_code for each in answers] for answers in (reading, writing, opaque)]
    assert statuses == [[403, 200, 200], [200, 403, 200], [401, 401, 401]]
    cause = "The token is no JWT, as access tokens are"
    assert all(cause in each.headers["WWW-Authenticate"] for each in opaque)
