"""openapi-generator makes clients from the OpenAPI document, in languages that check types, and they work."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Coroutine
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.local.machine.folders import LOCAL
from service import app
from service.identifiers import uuid_of
from service.outbox.events import event_id
from tests.deploy.mail_catching import mail_catcher
from tests.end_to_end.client_programs import GENERATED, JAVA, PYTHON, TYPESCRIPT
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually

pytestmark = pytest.mark.long

BODY = A_REQUEST | {
    "customer_email": "perm-fail@example.test",  # The mail catcher refuses it.
    "property_value": 300_000,
    "meta_data": {"source": "website"},
}


@pytest.fixture(scope="module")
def jar():
    """The archive of openapi-generator. It also has the libraries that the generated Java uses."""
    reason = "openapi-generator is installed by `make test-long`"
    pytest.importorskip("openapi_generator_cli", reason=reason)
    if not (shutil.which("java") and shutil.which("javac")):
        pytest.skip("Java is not installed")
    with resources.as_file(resources.files("openapi_generator_cli") / "openapi-generator.jar") as archive:
        yield str(archive)


def in_python(folder: Path, jar: str) -> list[str]:
    """Generate a client; return the command that calls the API with it."""
    generate(folder, jar, "python")
    (folder / "calls.py").write_text(PYTHON)
    return [sys.executable, "calls.py"]


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


def run(folder: Path, *command: str, seconds: float = 300.0) -> str:
    """Run a command to its end; return what it printed."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module", params=[in_python, in_java, in_typescript])
def call(request, tmp_path_factory, jar):
    """Runs the program of a client, which is made once, with these arguments; returns what it printed."""
    folder = tmp_path_factory.mktemp("client")
    command = request.param(folder, jar)
    return lambda *arguments: msgspec.json.decode(run(folder, *command, *arguments, seconds=120.0))


async def test_client_made_by_openapi_generator_corrects_withdraws_and_misses_no_event_over_a_restart(
    *, call, api, issuer, worker_settings, database, tmp_path
):
    def program(calls: str, sent: Any) -> Coroutine[Any, Any, Any]:
        arguments = (api.base_url, issuer.token(), calls, msgspec.json.encode(sent).decode())
        return asyncio.to_thread(call, *arguments)

    with mail_catcher(tmp_path / "mails") as port:
        worker = worker_process(worker_settings, tmp_path, SMTP_URL=f"smtp://127.0.0.1:{port}")
        async with started(api, worker):
            created, read, questions, error, *facts, another, after, ids = await program("walk", BODY)
            async with database.transaction():
                await database.execute("SELECT FROM calculation_request FOR UPDATE")
                restart = asyncio.create_task(program("restart", [another, after, ids]))
                await eventually(lambda: '"status":503' in api.output)
            everything = await restart
            from_the_beginning = await program("restart", [another, None, ids])

    assert created["data"].items() >= BODY.items()
    assert created["errors"] is None
    assert read["data"] == created["data"]
    assert questions["data"]["questionnaire"][0]["ref"] == "case_ref"
    assert error["data"] is None
    assert [each["code"] for each in error["errors"]] == ["too_many_emails"]
    assert facts == ["60", "refused", "customer_email", 2]
    (mail,) = (tmp_path / "mails").glob("*.eml")
    assert A_REQUEST["customer_email"].encode() in mail.read_bytes()
    assert [len(ids), len(everything)] == [4, 7]  # The other request was created, refused and withdrawn.
    assert from_the_beginning == everything
    rows = await database.fetch("SELECT request_id, type, sequence FROM event ORDER BY request_id, sequence")
    kept = [event_id(uuid_of(row["request_id"]), row["type"], row["sequence"]) for row in rows]
    in_feed, in_database = (
        sorted(each, key=lambda each: each.partition(".")[0]) for each in (everything, kept)
    )
    assert in_feed == in_database


async def test_client_made_by_openapi_generator_reads_events_of_each_type_and_of_a_later_one(
    call, api, issuer, caller, database
):
    request = await stored.insert_with_each_event(database)
    async with started(api):
        sent = (await caller.get(f"/v1/request/{request.uuid}/events")).json()
        (got,) = call(api.base_url, issuer.token(), "events", request.uuid)

    for event, each in zip(got["data"]["events"], sent["data"]["events"], strict=True):
        assert (event["type"], event["data"]) == (each["type"], each["data"])
