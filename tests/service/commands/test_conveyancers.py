"""`conveyancer` and `api-key`: a firm is registered, changed, disabled and enabled, and has keys."""

import json
import re

import httpx

from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER, STRUCTURE
from tests.harness.http import bearer

A_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


async def statuses(client: httpx.AsyncClient, uuid: str) -> set[int]:
    """Return how the firm's requests are answered: create, repeat, read, list, events."""
    answers = [
        await client.post("/v1/request", json=A_REQUEST),
        await client.post("/v1/request", json=A_REQUEST, headers={"Idempotency-Key": "a"}),
        await client.get(f"/v1/request/{uuid}"),
        await client.get("/v1/request"),
        await client.get("/v1/request", params={"external_id": "case-1"}),
        await client.get("/v1/event"),
        await client.get(f"/v1/request/{uuid}/events"),
    ]
    return {answer.status_code for answer in answers}


async def test_disabled_firm_is_refused_at_once_and_served_when_enabled(environment, client, database):
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    before = await statuses(client, created["uuid"])

    disable, show = ("disable", CONVEYANCER), ("list", "--json")
    disabled, listed, _, listed_again = [
        await run("service", "conveyancer", *words, environment=environment)
        for words in (disable, show, disable, show)
    ]
    refused = await statuses(client, created["uuid"])
    requests = await database.fetchval("SELECT count(*) FROM calculation_request")
    by_link = await client.get(f"/v1/request/{created['uuid']}", headers=bearer(created["secret"]))
    by_token = await client.get(STRUCTURE)
    add = ("service", "conveyancer", "add", CONVEYANCER, "--name", "Acme and Sons")
    changed = await run(*add, environment=environment)
    in_a_pod = {**environment, "LOGNAME": "Grace"}  # as deploy/operate.sh sets it
    enabled = await run("service", "conveyancer", "enable", CONVEYANCER, environment=in_a_pod)

    assert before == await statuses(client, created["uuid"]) == {200}
    assert (disabled.status, disabled.output) == (0, f"conveyancer {CONVEYANCER} disabled\n")
    assert refused == {403}
    assert requests == 3
    assert (by_link.status_code, by_token.status_code) == (200, 200)
    assert json.loads(listed.output)[0]["disabled_at"] is not None
    assert listed_again == listed, "with the first time"
    assert changed.output.endswith(", and still disabled\n")
    assert (enabled.status, enabled.output) == (0, f"conveyancer {CONVEYANCER} enabled\n")
    latest = "SELECT conveyancer_id, operator FROM operator_action ORDER BY id DESC LIMIT 1"
    assert await database.fetchrow(latest) == (CONVEYANCER, "Grace")


async def test_conveyancer_is_added_and_changed_which_is_listed_and_on_record(environment, database):
    add = ("service", "conveyancer", "add", " new-firm")  # Spaces around an argument are left out.
    sons = "New & Sons"
    terms = [["New"], [" New ", "--charges-calculation-fee"], [sons, "--note", " a merger\u00a0"], [sons]]
    changes = [await run(*add, "--name", *each, environment=environment) for each in terms]
    listed = await run("service", "conveyancer", "list", "--json", environment=environment)

    new, charging = "'New', no calculation fee", "'New', a calculation fee"
    renamed = "'New & Sons', a calculation fee"
    shown = [new, f"{new} -> {charging}", f"{charging} -> {renamed}", f"{renamed} -> {renamed}"]
    announced = [f"conveyancer new-firm registered: {each}\n" for each in shown]
    assert [each.output for each in changes] == announced
    assert changes[3].errors == "", "nothing was changed"
    assert [(firm["id"], firm["charges_calculation_fee"]) for firm in json.loads(listed.output)] == [
        (CONVEYANCER, True),
        (FREE_CONVEYANCER, False),
        ("new-firm", True),
    ]
    query = "SELECT conveyancer_id, action, subject, note FROM operator_action ORDER BY id"
    assert [tuple(row) for row in await database.fetch(query)] == [
        ("new-firm", "conveyancer add", each, note)
        for each, note in zip(shown[:3], (None, None, "a merger"), strict=True)
    ]


async def test_api_key_opens_the_questionnaire_until_it_is_revoked(environment, client, database):
    created = await run("service", "api-key", "create", "our-page", environment=environment)
    key = created.output.strip()
    opened = await client.get(STRUCTURE, headers=bearer(key))
    prefix = key.split("_")[1]
    revoked = await run("service", "api-key", "revoke", prefix, environment=environment)
    closed = await client.get(STRUCTURE, headers=bearer(key))
    listed = await run("service", "api-key", "list", environment=environment)
    logged = [json.loads(each.errors) for each in (created, revoked)]
    records = await database.fetch("SELECT action, subject FROM operator_action ORDER BY id")

    assert listed.output.splitlines()[1].split()[:2] == [prefix, "our-page"]
    assert len(A_TIME.findall(listed.output)) == 2
    assert key not in listed.output + created.errors
    assert records == [("api-key create", f"{prefix} of our-page"), ("api-key revoke", prefix)]
    assert [(each["action"], each["subject"]) for each in logged] == records
    assert (created.status, revoked.status) == (0, 0)
    assert (opened.status_code, closed.status_code) == (200, 401)
