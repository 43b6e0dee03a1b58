"""`conveyancer` and `api-key`: a firm is registered, changed, disabled and enabled, and has keys."""

import json
import re

import httpx

from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.processes import Ended

STRUCTURE = "/v1/questionnaire/structure"
A_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


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
    query = "SELECT conveyancer_id, action, operator FROM operator_action ORDER BY id"
    assert [tuple(row) for row in await database.fetch(query)] == [
        *[(CONVEYANCER, "conveyancer disable", "Ada")] * 2,
        (CONVEYANCER, "conveyancer enable", "Grace"),
    ]


async def test_firm_that_is_registered_again_stays_disabled(environment):
    await run("service", "conveyancer", "disable", CONVEYANCER, environment=environment)

    words = ("service", "conveyancer", "add", CONVEYANCER, "--name", "Acme and Sons")
    ended = await run(*words, environment=environment)

    assert ended.output.endswith(", and still disabled\n")


async def test_conveyancer_is_added_and_changed_which_is_listed_and_on_record(environment, database):
    add = ("service", "conveyancer", "add", "new-firm")
    changes = [
        await run(*add, *words, environment=environment)
        for words in (
            ("--name", "New"),
            ("--name", "New", "--charges-calculation-fee"),
            ("--name", "New & Sons", "--note", "a merger"),
            ("--name", "New & Sons"),
        )
    ]
    listed = await run("service", "conveyancer", "list", environment=environment)
    for_scripts = await run("service", "conveyancer", "list", "--json", environment=environment)

    new, charging, renamed = (
        "'New', no calculation fee",
        "'New', a calculation fee",
        "'New & Sons', a calculation fee",
    )
    shown = [new, f"{new} -> {charging}", f"{charging} -> {renamed}", f"{renamed} -> {renamed}"]
    assert changes == [Ended(0, f"conveyancer new-firm registered: {each}\n", "") for each in shown]
    assert listed.output.splitlines()[-1].split() == ["new-firm", "New", "&", "Sons", "True", "-"]
    assert [(firm["id"], firm["charges_calculation_fee"]) for firm in json.loads(for_scripts.output)] == [
        (CONVEYANCER, True),
        (FREE_CONVEYANCER, False),
        ("new-firm", True),
    ]
    query = "SELECT conveyancer_id, action, subject, note FROM operator_action ORDER BY id"
    assert [tuple(row) for row in await database.fetch(query)] == [
        ("new-firm", "conveyancer add", each, note)
        for each, note in zip(shown[:3], (None, None, "a merger"), strict=True)
    ]


async def test_api_key_opens_the_questionnaire_until_it_is_revoked(environment, service_settings):
    created = await run("service", "api-key", "create", CONVEYANCER, environment=environment)
    key = created.output.strip()
    async with api_client(service_settings, key) as caller:
        opened = await caller.get(STRUCTURE)
        prefix = key.split("_")[1]
        revoked = await run("service", "api-key", "revoke", prefix, environment=environment)
        closed = await caller.get(STRUCTURE)
    listed = await run("service", "api-key", "list", environment=environment)

    assert listed.output.splitlines()[1].split()[:2] == [prefix, CONVEYANCER]
    assert len(A_TIME.findall(listed.output)) == 2
    assert key not in listed.output
    assert (created.status, revoked.status) == (0, 0)
    assert opened.status_code == 200
    assert len(opened.json()["data"]["questionnaire"]) == 27
    assert closed.status_code == 401
