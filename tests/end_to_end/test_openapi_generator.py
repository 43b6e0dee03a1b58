"""openapi-generator makes clients from the OpenAPI document, in languages that check types, and they work."""

import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from deploy.local.machine.folders import LOCAL
from service import app
from tests.end_to_end.client_programs import GENERATED, JAVA, TYPESCRIPT
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from tests.harness.processes import started

pytestmark = pytest.mark.long

BODY = A_REQUEST | {"property_value": 300_000, "meta_data": {"source": "website"}}


@pytest.fixture
def jar():
    """The archive of openapi-generator. It also has the libraries that the generated Java uses."""
    reason = "openapi-generator is installed by `make test-long`"
    pytest.importorskip("openapi_generator_cli", reason=reason)
    if not (shutil.which("java") and shutil.which("javac")):
        pytest.skip("Java is not installed")
    with resources.as_file(resources.files("openapi_generator_cli") / "openapi-generator.jar") as archive:
        yield str(archive)


def in_java(folder: Path, jar: str) -> list[str]:
    """Generate a client, and compile it; return the command that calls the API with it."""
    # Without the lookup, the client finds that an event is another event, too, and refuses it.
    options = "openApiNullable=false,useOneOfDiscriminatorLookup=true"
    generate(folder, jar, "java", "--library", "native", "--additional-properties", options)
    (folder / "Calls.java").write_text(JAVA)
    (folder / "Generated.java").write_text(GENERATED)
    sources = [str(source) for source in folder.rglob("*.java") if "test" not in source.parts]
    run(folder, "javac", "-proc:none", "-nowarn", "-cp", jar, "-d", "classes", *sources)
    return ["java", "-cp", f"classes{os.pathsep}{jar}", "Calls"]


def in_typescript(folder: Path, jar: str) -> list[str]:
    """Generate a client, and compile it; return the command that calls the API with it."""
    compiler = LOCAL / "node/node_modules/typescript/bin/tsc"
    if not (shutil.which("node") and compiler.exists()):
        pytest.skip("TypeScript is not installed")
    generate(folder, jar, "typescript-fetch")
    (folder / "calls.ts").write_text(f"declare const process: {{ argv: string[] }};{TYPESCRIPT}")
    run(folder, "node", str(compiler), "--strict", "--target", "es2022", "--module", "commonjs", "calls.ts")
    return ["node", "calls.js"]


def generate(folder: Path, jar: str, *options: str) -> None:
    (folder / "openapi.json").write_bytes(msgspec.json.encode(app.describe()))
    run(folder, "java", "-jar", jar, "generate", "-i", "openapi.json", "-o", ".", "-g", *options)


def run(folder: Path, *command: str) -> str:
    """Run a command to its end; return what it printed."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(params=[in_java, in_typescript])
def call(request, tmp_path, jar):
    """Runs the program of a client with these arguments; returns what it printed."""
    command = request.param(tmp_path, jar)
    return lambda *arguments: msgspec.json.decode(run(tmp_path, *command, *arguments))


async def test_client_made_by_openapi_generator_creates_reads_and_tells_events_of_each_type_apart(
    call, api, issuer, caller, database
):
    request = await stored.insert_with_each_event(database)
    body = msgspec.json.encode(BODY).decode()
    async with started(api):
        sent = (await caller.get(f"/v1/request/{request.uuid}/events")).json()
        got = call(api.base_url, issuer.token(), body, request.uuid)

    created, read, questions, events, error, *reasons = got
    assert created["data"].items() >= BODY.items()
    assert created["errors"] is None
    assert read["data"] == created["data"]
    assert questions["data"]["questionnaire"][0]["ref"] == "case_ref"
    assert error["data"] is None
    assert error["errors"][0]["field"] == "customer_email"
    assert reasons == ["refused"]
    for event, each in zip(events["data"]["events"], sent["data"]["events"], strict=True):
        assert (event["type"], event["data"]) == (each["type"], each["data"])
