"""The service does what its OpenAPI document says, whatever Schemathesis sends."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from service import conveyancers
from service.postgres import Connection
from tests.conftest import CONVEYANCER, Issuer
from tests.end_to_end.processes import Process, bare_environment
from tests.fuzz.conftest import LONG

_CONFIGURATION = Path(__file__).parent / "schemathesis.toml"
_EXAMPLES = 2500 if LONG else 60  # for each operation and phase
_CASES = 20_000 if LONG else 300


async def test_service_keeps_to_its_document(
    api: Process, issuer: Issuer, database: Connection, tmp_path: Path
) -> None:
    token = issuer.token(exp=4_102_444_800)
    key = await conveyancers.create_api_key(database, CONVEYANCER)

    ended = await asyncio.to_thread(
        subprocess.run,
        [
            *(sys.executable, "-m", "schemathesis.cli", "--no-color", "--config-file", str(_CONFIGURATION)),
            *("run", f"{api.base_url}/schema/openapi.json", "--max-examples", str(_EXAMPLES)),
        ],
        env=bare_environment(ACCESS_TOKEN=token, API_KEY=key),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    print(ended.stdout[-3000:])
    assert ended.returncode == 0, ended.stdout
    generated = re.search(r"(\d+) generated", ended.stdout)
    assert generated is not None
    assert int(generated[1]) >= _CASES
    assert "request_failed" not in api.output
