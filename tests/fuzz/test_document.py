"""The service conforms to its OpenAPI document, whatever Schemathesis sends."""

import asyncio
import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from deploy.local.machine.folders import CHECKOUT
from service.authentication import api_keys
from tests.fuzz.conftest import LONG
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import Process, api_process, bare_environment, python, started

_CONFIGURATION = str(Path(__file__).with_name("schemathesis.toml"))
# Each run of `make fuzz` has new seeds, which Schemathesis prints.
_OPTIONS = ["--max-examples", "1100"] if LONG else ["--max-examples", "100", "--seed", "1"]
_PROCESSES, _CASES = (4, 20_000) if LONG else (1, 700)


@pytest.mark.long
async def test_service_conforms_to_its_document(service_settings, issuer, database, tmp_path):
    api = api_process(service_settings, tmp_path, LOG_LEVEL="WARNING")
    key = await api_keys.create(database, CONVEYANCER)
    tokens = {"ACCESS_TOKEN": issuer.token(exp=4_102_444_800), "API_KEY": key}

    async with started(api):
        runs = (asyncio.to_thread(run, api, tmp_path, tokens) for _ in range(_PROCESSES))
        generated = await asyncio.gather(*runs)

    assert sum(generated) >= _CASES
    # Without a valid token, each answer would be a documented 401.
    assert await database.fetchval("SELECT count(*) FROM calculation_request") >= _CASES / 100
    assert "request_failed" not in api.output


def run(api: Process, parent: Path, variables: dict[str, str]) -> int:
    """Run Schemathesis in a folder of its own, and return how many cases it generated."""
    command = ["schemathesis.cli", "--no-color", "--config-file", _CONFIGURATION, "run"]
    ended = subprocess.run(
        python(*command, f"{api.base_url}/schema/openapi.json", *_OPTIONS),
        env=bare_environment(PYTHONPATH=str(CHECKOUT), **variables),  # the path is for the hooks
        cwd=tempfile.mkdtemp(dir=parent),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    print(ended.stdout.partition("= SUMMARY =")[2])
    return int(re.findall(r"(\d+) generated", ended.stdout)[0])
