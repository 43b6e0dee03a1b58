"""What integrators begin with: the calls and programs on the pages, and generated clients."""

import asyncio
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from functools import partial
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from aio_pika.exceptions import ChannelNotFoundEntity
from yarl import URL

from deploy.local import environment as environments
from deploy.local.machine.folders import CHECKOUT, LOCAL, Place
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from service import app
from service.identifiers import uuid_of
from service.outbox.events import SENT, event_id
from tests.deploy.pages import API, README, code_blocks
from tests.end_to_end.client_programs import PYTHON
from tests.end_to_end.parties import create
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import run
from tests.harness.processes import Process, bare_environment, started, worker_process
from tests.harness.queues import count, declare_topology, holds, is_refused, open_channel, read, write
from tests.harness.servers import mail_catcher, run_as_operator
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

QUEUE = "calculator"  # of the program


def printed_by(folder: Path, *command: str) -> str:
    """Run a command in *folder* to its end; return what it printed."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_first_calls_are_answered_and_lead_to_one_email_each_that_only_its_owner_can_read(
    *, api, worker_settings, issuer, tmp_path
):
    mails = tmp_path / "mails"
    mails.mkdir(mode=0o755)
    (tmp_path / ".local").mkdir()
    variables = {"BASE_URL": api.base_url, "ACCESS_TOKEN": issuer.token(), "MAIL_DIR": str(mails)}
    environments.write(tmp_path / ".local" / "env", variables)
    calls = code_blocks(README, "Two commands", "sh")[-1]
    (more_calls,) = code_blocks(API, "First call to first e-mail", "sh")
    (described,) = re.findall("```sh\n(.*?)```", app.describe()["info"]["description"], re.DOTALL)

    with mail_catcher(mails) as port:
        worker = worker_process(worker_settings, tmp_path, SMTP_URL=f"smtp://127.0.0.1:{port}")
        async with started(api, worker):
            document = f"BASE_URL={api.base_url} ACCESS_TOKEN={issuer.token()}\n{described}"
            first, again, of_document = [
                await asyncio.to_thread(printed_by, tmp_path, "sh", "-euc", block)
                for block in (calls + more_calls, calls, document)
            ]

    uuids = [set(re.findall(r'"uuid": ?"(\w+)"', printed)) for printed in (first, again)]
    for printed, answered in ((first, 4), (again, 1)):
        assert len(re.findall(r'"code": ?200,', printed)) == answered
        assert printed.count("\nTo: Ada Lovelace <ada@example.com>") == 1
    assert [*map(len, uuids)] == [1, 1]
    assert uuids[0] != uuids[1]
    assert max(map(len, first.splitlines())) < 5_000, "hides the rest"
    assert first.count("\nidempotent-replayed: true") == 1
    assert '"type":"request.created"' in first
    assert first.count('"code":"required"') == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in (mails, *mails.iterdir())} == {0o700, 0o600}
    assert '"status":{"code":200,"message":"OK"}' in of_document


def first_consumer(amqp_url: str, folder: Path) -> Process:
    """Return the program, not yet started."""
    program = Path(__file__).with_name("first_consumer.py")
    environment = bare_environment(AMQP_URL=amqp_url)
    return Process("consumer", [sys.executable, program], environment=environment, port=0, folder=folder)


async def consumes(amqp_url: str) -> bool:
    with suppress(ChannelNotFoundEntity):
        async with open_channel(amqp_url) as channel:
            return bool((await channel.get_queue(QUEUE)).declaration_result.consumer_count)
    return False


async def test_requests_get_a_calculation_once_even_after_a_stop_and_a_replay(
    *, api, worker, caller, amqp_url, channel, environment, subscriber, tmp_path
):
    async def has_its_calculation(uuid: str) -> bool:
        record = (await caller.get(f"/v1/request/{uuid}")).json()["data"]
        return bool(record["calculation_id"] == f"calc_{uuid}")

    async def has_at_least(messages: int, queue: str) -> bool:
        return await count(channel, queue) >= messages

    consumer = first_consumer(amqp_url, tmp_path)
    calculations = await channel.declare_queue(exclusive=True)
    await calculations.bind(topology.CALCULATIONS, "#")
    async with started(api, worker):
        async with started(consumer, ready=False):
            await eventually(lambda: consumes(amqp_url))
            first = (await create(caller))["uuid"]
            await eventually(lambda: has_its_calculation(first))
        second = (await create(caller))["uuid"]
        await eventually(lambda: count(channel, QUEUE))
        async with started(consumer, ready=False):
            await eventually(lambda: has_its_calculation(second))
            await eventually(lambda: {"request.email_sent", "request.calculated"} <= subscriber.types(second))
            assert len({event["traceparent"][3:35] for event in subscriber.about(second)}) == 1
            replay = ("worker", "outbox", "replay", "--from", "2020-01-01T00:00:00Z")
            await run(*replay, environment=environment)
            await eventually(lambda: has_at_least(4, calculations.name))
            await eventually(lambda: holds(channel, topology.CALCULATION_RESULTS.name, 0))
            consumer.running.send_signal(signal.SIGINT)
            status = await consumer.exit_status()
    await channel.queue_delete(QUEUE)

    assert (status, "Traceback" in consumer.output) == (0, False)
    assert all(f"\n{result} calc_{second}\n" in consumer.output for result in ("sent", "accepted"))
    assert await holds(channel, topology.CALCULATION_RESULTS.dead_letters, 0)
    assert len(subscriber.event_ids) == 6


@pytest.mark.long
async def test_account_of_a_team_is_enough_for_the_program_and_opens_nothing_else(tmp_path):
    account = code_blocks(CHECKOUT / "worker/README.md", "First queue to first calculation", "sh")[-1]
    reader = account.replace("calculations|", "").replace("calculator", "reader")
    event = b'{"data": {"uuid": "req_01a9ZkW3mT6qPxB8vNcR4d"}}'
    # A node of its own, because accounts stay.
    with rabbitmq_node(Place(folder=tmp_path)) as broker:
        with_password = URL(broker.url).with_password("a-password")
        url, reader_url = (str(with_password.with_user(user)) for user in (QUEUE, "reader"))
        async with open_channel(broker.url) as channel:
            await declare_topology(channel)
            await asyncio.to_thread(run_as_operator, account + reader, broker, PASSWORD="a-password")
            async with started(first_consumer(url, tmp_path), ready=False):
                await eventually(lambda: consumes(broker.url))
                await write(channel, topology.REQUESTS, topology.NOTIFICATIONS.routing_key, event)
                await eventually(lambda: count(channel, topology.CALCULATION_RESULTS.name))

        calculate = partial(write, exchange=topology.CALCULATIONS)
        assert not await is_refused(url, calculate)
        assert await is_refused(reader_url, calculate)
        assert await is_refused(url, partial(write, exchange=topology.REQUESTS))
        assert await is_refused(url, partial(read, queue=topology.NOTIFICATIONS.name))
        assert await is_refused(url, lambda ours: ours.queue_delete(topology.NOTIFICATIONS.name))


CLIENTS = Path(__file__).with_name("clients")  # in other languages
BODY = A_REQUEST | {"property_value": 300_000, "meta_data": {"source": "website"}}


def in_python(folder: Path) -> list[str]:
    """Generate a client; return the command that calls the API with it."""
    (folder / "configuration.json").write_text('{"post_hooks": []}')
    (folder / "calls.py").write_text(PYTHON)
    options = ["--path", "openapi.json", "--meta", "none", "--output-path", "calculations_client"]
    options += ["--config", "configuration.json", "--fail-on-warning"]
    printed_by(folder, sys.executable, "-m", "openapi_python_client", "generate", *options)
    return [sys.executable, "calls.py"]


def in_java(folder: Path) -> list[str]:
    """Generate a client, and compile it; return the command that calls the API with it."""
    # Without the lookup, the client finds that an event is another event, too, and refuses it.
    options = "openApiNullable=false,useOneOfDiscriminatorLookup=true"
    jar = generate(folder, "java", "--library", "native", "--additional-properties", options)
    shutil.copytree(CLIENTS, folder, dirs_exist_ok=True)
    sources = [str(source) for source in folder.rglob("*.java") if "test" not in source.parts]
    printed_by(folder, "javac", "-proc:none", "-nowarn", "-cp", jar, "-d", "classes", *sources)
    return ["java", "-cp", f"classes{os.pathsep}{jar}", "Calls"]


def in_typescript(folder: Path) -> list[str]:
    """Generate a client, and compile it; return the command that calls the API with it."""
    compiler = LOCAL / "node/node_modules/typescript/bin/tsc"
    if not (shutil.which("node") and compiler.exists()):
        pytest.skip("TypeScript is not installed")
    generate(folder, "typescript-fetch")
    shutil.copy(CLIENTS / "calls.ts", folder)
    options = ("--strict", "--target", "es2022", "--module", "commonjs")
    printed_by(folder, "node", str(compiler), *options, "calls.ts")
    return ["node", "calls.js"]


def generate(folder: Path, *options: str) -> str:
    """Run openapi-generator; return its archive, which also has the libraries that the Java uses."""
    pytest.importorskip("openapi_generator_cli", reason="openapi-generator is installed by `make test-long`")
    if not (shutil.which("java") and shutil.which("javac")):
        pytest.skip("Java is not installed")
    jar = str(resources.files("openapi_generator_cli") / "openapi-generator.jar")
    printed_by(folder, "java", "-jar", jar, "generate", "-i", "openapi.json", "-o", ".", "-g", *options)
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
        printed = printed_by(tmp_path, *command, api.base_url, issuer.token(), body, request.uuid)

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
        rows = await database.fetch("SELECT request_id, type, sequence FROM event")
        kept = [event_id(uuid_of(request_id), *event) for request_id, *event in rows]
        ids, kinds = of_feed
        assert sorted(ids) == sorted(kept), "an event of the feed is missing, or came twice"
        assert kinds == [*(f"{event.__name__}Event" for event in SENT), "AnotherEvent"]
