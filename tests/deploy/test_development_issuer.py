"""A developer's cluster signs its own access tokens."""

import asyncio
import subprocess
import sys

import httpx
import msgspec

from tests.deploy.manifests import configuration, the_one
from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.in_process import api_client


async def test_token_that_is_signed_in_the_apis_pod_opens_the_api(service_settings, tmp_path):
    settings = configuration("dev")
    script = the_one("dev", "ConfigMap", "issuer-script")["data"]["issuer.py"]
    await asyncio.to_thread(subprocess.run, [sys.executable, "-c", script, tmp_path], check=True)
    words = ("service", "token", CONVEYANCER, "--key", str(tmp_path / "key.pem"))
    token = (await run(*words, environment=settings)).output.strip()
    of_the_pod = msgspec.structs.replace(
        service_settings,
        auth_issuer=settings["AUTH_ISSUER"],
        auth_audience=settings["AUTH_AUDIENCE"],
        auth_jwks_url=f"file://{tmp_path}/jwks.json",
    )
    async with api_client(of_the_pod, token) as client:
        created = await client.post("/v1/request", json=A_REQUEST)

    assert created.status_code == httpx.codes.OK
