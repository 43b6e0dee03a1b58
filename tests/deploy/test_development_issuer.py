"""A developer's cluster signs its own access tokens."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec

from deploy.local.machine.folders import CHECKOUT
from tests.deploy.manifests import Manifest, configuration, container_of, pod_of, the_one, workloads
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.in_process import api_client


def run(*words: str | Path, **variables: str) -> str:
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=CHECKOUT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout.strip()


def issuer_container() -> Manifest:
    first = pod_of(workloads("dev")["api"])["initContainers"]
    return next(container for container in first if container["name"] == "issuer")


async def test_token_that_is_signed_in_the_apis_pod_opens_the_api(service_settings, tmp_path):
    settings = configuration("dev")
    run("-c", the_one("dev", "ConfigMap", "issuer-script")["data"]["issuer.py"], tmp_path)
    token = run("-m", "service", "token", CONVEYANCER, "--key", tmp_path / "key.pem", **settings)
    of_the_pod = msgspec.structs.replace(
        service_settings,
        auth_issuer=settings["AUTH_ISSUER"],
        auth_audience=settings["AUTH_AUDIENCE"],
        auth_jwks_url=f"file://{tmp_path}/jwks.json",
    )
    async with api_client(of_the_pod, token) as client:
        created = await client.post("/v1/request", json=A_REQUEST)

    assert created.status_code == httpx.codes.OK


def test_api_reads_the_keys_that_its_pod_made():
    (mount,) = container_of(workloads("dev")["api"])["volumeMounts"]
    written = {one["name"]: one["mountPath"] for one in issuer_container()["volumeMounts"]}

    assert issuer_container()["command"][-1] == written[mount["name"]] == mount["mountPath"]
    assert configuration("dev")["AUTH_JWKS_URL"] == f"file://{mount['mountPath']}/jwks.json"
