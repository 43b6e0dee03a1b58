"""What of `make cluster-check` needs no cluster: its callers and its verdict."""

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest

from service.identifiers import uuid_of
from tests.cluster.verdict import Create, Run
from tests.harness.processes import api_process, started

_RUN = Run(
    creates=[Create("run-0-1", "req_1"), Create("run-0-2", "req_2", ["503"])],
    stored={"run-0-1": "req_1", "run-0-2": "req_2"},
    recipients=["run-0-1@example.com", "run-0-2@example.com"],
    queued={"notifications": 0},
    undelivered=0,
    kills=0,
)


def test_run_that_lost_nothing_has_no_breach():
    assert [*_RUN.breaches()] == []
    assert _RUN.summary() == "2 creates, 0 e-mails repeated; tries that failed: 1 503"


@pytest.mark.parametrize(
    ("changes", "breach"),
    [
        ({"creates": [Create("run-0-1", None, ["401"])]}, "run-0-1 never got 200: ['401']"),
        ({"creates": [Create("run-0-1", "req_9")]}, "run-0-1 got req_9, but req_1 is stored"),
        ({"recipients": ["run-0-2@example.com"]}, "run-0-1@example.com: 0 e-mails"),
        ({"recipients": [*_RUN.recipients, "run-9-9@example.com"]}, "run-9-9@example.com: 1 e-mails"),
        ({"recipients": [*_RUN.recipients] * 2}, "2 e-mails were repeated, after 0 kills"),
        ({"queued": {"notifications.dead": 1}}, "notifications.dead has 1 messages"),
        ({"undelivered": 1}, "1 events are in the outbox"),
    ],
)
def test_each_breach_is_found(changes, breach):
    assert [*msgspec.structs.replace(_RUN, **changes).breaches()] == [breach]


@pytest.mark.long
async def test_callers_repeat_what_fails_until_it_is_stored(service_settings, issuer, database, tmp_path):
    api = api_process(service_settings, tmp_path)
    async with started(api):
        with Path(__file__).with_name("callers.py").open("rb") as script:  # as kubernetes.py runs it
            calling = await asyncio.create_subprocess_exec(
                *(sys.executable, "-", api.base_url, "40", "run"),
                stdin=script,
                stdout=asyncio.subprocess.PIPE,
                env={"ACCESS_TOKEN": issuer.token()},
            )
        assert calling.stdout is not None
        lines = [await calling.stdout.readline() for _ in range(20)]
        await api.kill()
        api.start()
        while not (create := msgspec.json.decode(await calling.stdout.readline(), type=Create)).failures:
            lines.append(msgspec.json.encode(create))
        calling.terminate()
        rest, _ = await calling.communicate()

    creates = [create, *(msgspec.json.decode(line, type=Create) for line in (*lines, *rest.splitlines()))]
    rows = await database.fetch("SELECT idempotency_key, id FROM calculation_request")
    stored = {row["idempotency_key"]: uuid_of(row["id"]) for row in rows}
    assert {create.key: create.uuid for create in creates} == stored
    assert calling.returncode == 0
