"""Clients generated from the OpenAPI document work, also with a later release of the service.

openapi-python-client makes one in Python; openapi-generator makes one in two languages that check types.
"""

import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from deploy.local.machine.folders import LOCAL
from service import app
from service.identifiers import uuid_of
from service.outbox.events import SENT, event_id
from tests.end_to_end.client_programs import GENERATED, JAVA, PYTHON, TYPESCRIPT
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from tests.harness.processes import started

BODY = A_REQUEST | {"property_value": 300_000, "meta_data": {"source": "website"}}
EVENTS = "SELECT request_id, type, sequence FROM event"


def run(folder: Path, *command: str) -> str:
    """Run a command to its end; return what it printed."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    return ended.stdout


def in_python(folder: Path) -> list[str]:
    """Generate a client; return the command that calls the API with it."""
    (folder / "configuration.json").write_text('{"post_hooks": []}')
    (folder / "calls.py").write_text(PYTHON)
    options = ("--path", "openapi.json", "--meta", "none", "--output-path", "calculations_client")
    options += ("--config", "configuration.json", "--fail-on-warning")
    run(folder, sys.executable, "-m", "openapi_python_client", "generate", *options)
    return [sys.executable, "calls.py"]


def in_java(folder: Path) -> list[str]:
    """Generate a client, and compile it; return the command that calls the API with it."""
    if not shutil.which("javac"):
        pytest.skip("Java is not installed")
    # Without the lookup, the client finds that an event is another event, too, and refuses it.
    options = "openApiNullable=false,useOneOfDiscriminatorLookup=true"
    jar = generate(folder, "java", "--library", "native", "--additional-properties", options)
    (folder / "Calls.java").write_text(JAVA)
    (folder / "Generated.java").write_text(GENERATED)
    sources = [str(source) for source in folder.rglob("*.java") if "test" not in source.parts]
    run(folder, "javac", "-proc:none", "-nowarn", "-cp", jar, "-d", "classes", *sources)
    return ["java", "-cp", f"classes{os.pathsep}{jar}", "Calls"]


def in_typescript(folder: Path) -> list[str]:
    """Generate a client, and compile it; return the command that calls the API with it."""
    compiler = LOCAL / "node/node_modules/typescript/bin/tsc"
    if not (shutil.which("node") and compiler.exists()):
        pytest.skip("TypeScript is not installed")
    generate(folder, "typescript-fetch")
    (folder / "calls.ts").write_text(f"declare const process: {{ argv: string[] }};{TYPESCRIPT}")
    run(folder, "node", str(compiler), "--strict", "--target", "es2022", "--module", "commonjs", "calls.ts")
    return ["node", "calls.js"]


def generate(folder: Path, *options: str) -> str:
    """Run openapi-generator; return its archive, which also has the libraries that the Java uses."""
    pytest.importorskip("openapi_generator_cli", reason="openapi-generator is installed by `make test-long`")
    if not shutil.which("java"):
        pytest.skip("Java is not installed")
    jar = str(resources.files("openapi_generator_cli") / "openapi-generator.jar")
    run(folder, "java", "-jar", jar, "generate", "-i", "openapi.json", "-o", ".", "-g", *options)
    return jar


@pytest.mark.parametrize(
    "generated",
    [in_python, *(pytest.param(each, marks=pytest.mark.long) for each in (in_java, in_typescript))],
)
async def test_generated_client_creates_reads_and_tells_events_of_each_type_apart(
    *, generated, api, issuer, caller, database, tmp_path
):
    (tmp_path / "openapi.json").write_bytes(msgspec.json.encode(app.describe()))
    command = generated(tmp_path)
    request = await stored.insert_with_each_event(database)
    body = msgspec.json.encode(BODY).decode()
    async with started(api):
        sent = (await caller.get(f"/v1/request/{request.uuid}/events")).json()
        printed = run(tmp_path, *command, api.base_url, issuer.token(), body, request.uuid)

    created, read, questions, events, error, reason, *of_feed = msgspec.json.decode(printed)
    assert created["data"].items() >= BODY.items()
    assert created["errors"] is None
    assert read["data"] == created["data"]
    assert questions["data"]["questionnaire"][0]["ref"] == "case_ref"
    assert error["data"] is None
    assert error["errors"][0]["field"] == "customer_email"
    assert reason == "refused"
    for event, each in zip(events["data"]["events"], sent["data"]["events"], strict=True):
        assert (event["type"], event["data"]) == (each["type"], each["data"])
    if generated is in_python:
        rows = await database.fetch(EVENTS)
        kept = [event_id(uuid_of(row["request_id"]), row["type"], row["sequence"]) for row in rows]
        ids, kinds = of_feed
        assert sorted(ids) == sorted(kept), "an event of the feed is missing, or came twice"
        assert kinds == [*(f"{event.__name__}Event" for event in SENT), "AnotherEvent"]
