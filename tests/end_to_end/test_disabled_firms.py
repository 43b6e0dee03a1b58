"""`conveyancer disable`: a firm is refused at once, and its customers' links stay open."""

import json

import httpx
import pytest

from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST, CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.processes import Ended

STRUCTURE = "/v1/questionnaire/structure"


async def statuses(client: httpx.AsyncClient, uuid: str) -> list[int]:
    """Return how the firm's requests are answered: create, repeat, read, list, events."""
    keyed = {"Idempotency-Key": "a"}
    answers = [
        await client.post("/v1/request", json=A_REQUEST),
        await client.post("/v1/request", json=A_REQUEST, headers=keyed),
        await client.get(f"/v1/request/{uuid}"),
        await client.get("/v1/request"),
        await client.get("/v1/request", params={"external_id": "case-1"}),
        await client.get(f"/v1/request/{uuid}/events"),
    ]
    return [answer.status_code for answer in answers]


async def test_disabled_firm_is_refused_at_once_and_served_when_enabled(
    environment, service_settings, client, database
):
    body = A_REQUEST | {"external_id": "case-1"}
    created = (await client.post("/v1/request", json=body)).json()["data"]
    api_key = (await run("service", "api-key", "create", CONVEYANCER, environment=environment)).output.strip()
    before = await statuses(client, created["uuid"])

    words = ("service", "conveyancer", "disable", CONVEYANCER, "--by", "Ada", "--note", "contract ended")
    disabled = [await run(*words, environment=environment) for _ in range(2)]
    requests_before = await database.fetchval("SELECT count(*) FROM calculation_request")
    refused = await statuses(client, created["uuid"])
    requests_after = await database.fetchval("SELECT count(*) FROM calculation_request")
    async with api_client(service_settings, None) as other:
        by_key = await other.get(STRUCTURE, headers={"Authorization": f"Bearer {api_key}"})
        by_link = await other.get(
            f"/v1/request/{created['uuid']}", headers={"Authorization": f"Bearer {created['secret']}"}
        )
    by_token = await client.get(STRUCTURE)
    listed = await run("service", "conveyancer", "list", "--json", environment=environment)
    in_a_pod = {**environment, "LOGNAME": "Grace"}  # as `operate` in deploy/README.md sets it
    enabled = await run("service", "conveyancer", "enable", CONVEYANCER, environment=in_a_pod)
    after = await statuses(client, created["uuid"])

    assert before == after == [200] * 6
    assert disabled == [Ended(0, f"conveyancer {CONVEYANCER} disabled\n", "")] * 2
    assert refused == [403] * 6
    assert requests_before == requests_after
    assert (by_key.status_code, by_link.status_code, by_token.status_code) == (401, 200, 200)
    assert "or its firm is disabled" in by_key.text
    assert json.loads(listed.output)[0]["disabled_at"] is not None
    assert enabled == Ended(0, f"conveyancer {CONVEYANCER} enabled\n", "")
    rows = await database.fetch("SELECT conveyancer_id, action, operator FROM operator_action ORDER BY id")
    assert [tuple(row)[:2] for row in rows] == [
        (CONVEYANCER, "conveyancer disable"),
        (CONVEYANCER, "conveyancer disable"),
        (CONVEYANCER, "conveyancer enable"),
    ]
    assert [row["operator"] for row in rows] == ["Ada", "Ada", "Grace"]


@pytest.mark.parametrize(
    "words", [("conveyancer", "disable"), ("conveyancer", "enable"), ("api-key", "create")]
)
async def test_unknown_firm_is_pointed_out(environment, *, words):
    ended = await run("service", *words, "nobody", environment=environment)

    assert (ended.status, ended.output) == (1, "")
    assert ended.errors == "No conveyancer is registered under this identifier, or it is disabled.\n"


async def test_firm_that_is_registered_again_stays_disabled(environment):
    await run("service", "conveyancer", "disable", CONVEYANCER, environment=environment)

    words = ("service", "conveyancer", "add", CONVEYANCER, "--name", "Acme and Sons")
    ended = await run(*words, environment=environment)

    assert ended.output.endswith(", and still disabled\n")


@pytest.mark.parametrize(
    "words",
    [
        ("conveyancer", "list"),
        ("conveyancer", "disable", CONVEYANCER),
        ("api-key", "list"),
        ("request", "new-secret", "req_0000000000000000000000"),
    ],
    ids=" ".join,
)
async def test_outdated_schema_is_reported_in_one_line(environment, database, *, words):
    await database.execute("DELETE FROM schema_version")
    ended = await run("service", *words, environment=environment)

    assert (ended.status, ended.output) == (1, "")
    assert len(ended.errors.splitlines()) == 1
    assert "older than this release needs" in ended.errors
