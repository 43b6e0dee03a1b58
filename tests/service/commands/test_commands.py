"""What every command does with its arguments, answers and errors. `conveyancer`, `api-key` and `token`."""

import json
import re
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import click
import httpx
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from service.calculation_requests import erasing
from service.calculation_requests.changing import change
from service.command_line import parameters
from service.command_line.answering import Answer, answering, cell, printable
from service.command_line.answering import run as run_program
from service.identifiers import parse_uuid
from service.outbox.events import RequestCalculated, RequestWithdrawn
from tests.harness.examples import A_REQUEST, CONVEYANCER, FREE_CONVEYANCER, STRUCTURE
from tests.harness.http import bearer
from tests.harness.in_process import restored_logging, run
from tests.harness.processes import Ended
from tests.harness.stored import insert, new_request

UUID, NIL = "req_0000000000000000000000", "00000000-0000-0000-0000-000000000000"
A_TIME, NO_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "is not a time like"


def go(function: Any, *words: str, options: tuple[click.Parameter, ...] = ()) -> int:
    """Run *function* as the only command of a program, outside the event loop of the tests."""
    program = click.Group("program")
    command = program.command("go")(answering(function))
    command.params.extend(options)
    with restored_logging():
        return run_program(program, ["go", *words])


def raising(error: BaseException) -> Any:
    async def fail() -> Answer:
        raise error

    return fail


def test_answers_errors_and_cells_cannot_manipulate_the_terminal(capsys):
    """Which errors are expected: tests/worker/commands/test_commands.py."""
    uuid = parse_uuid(UUID)

    async def say() -> Answer:
        return Answer({"said": "\x1b\x9b\u202eé", "uuid": uuid}, "a text")

    assert (go(say), *capsys.readouterr()) == (0, "a text\n", "")
    assert go(say, "--json") == 0
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"said": "\x1b\x9b\u202eé", "uuid": UUID}
    assert (go(raising(click.ClickException("a\x1b[2J"))), *capsys.readouterr()) == (1, "", "a\\x1b[2J\n")
    with pytest.raises(ZeroDivisionError):  # An unexpected error is not hidden.
        go(raising(ZeroDivisionError()))
    assert printable("a\x1b[31m\n\u202eb\\") == "a\\x1b[31m\\n\\u202eb\\"
    assert cell("x" * 500) == "x" * 99 + "…"


async def test_time_may_be_a_span_before_now_by_the_clock_of_postgres(database):
    async with database.transaction():
        now = await database.fetchval("SELECT now()")
        for ago, minutes in (("90m", 90), ("2h", 120), ("3d", 3 * 24 * 60)):
            given = await parameters.at(database, parameters.time(ago))
            assert given == now - timedelta(minutes=minutes)


@pytest.mark.parametrize(
    ("kind", "word", "status", "part"),
    [
        *((parameters.uuid, uuid, 1, f'"{NIL}"') for uuid in (UUID, NIL)),
        (parameters.time, "2026-01-31T09:30:00Z", 1, '"2026-01-31 09:30:00+00:00"'),
        (parameters.time, "2026-01-31", 1, '"2026-01-31 00:00:00+00:00"'),
        (parameters.line, "é" * 255, 1, "\\u00e9" * 255),
        (parameters.uuid, "req_short\x1b[2J", 2, "'req_short\\x1b[2J' is not the uuid of a request"),
        (parameters.time, "yesterday", 2, "'yesterday' is not a time like 2026-"),
        *((parameters.time, text, 2, NO_TIME) for text in ("0001-01-01", "9999-12-31T23:59Z", "2w", "1.5h")),
        *((parameters.time, text, 2, NO_TIME) for text in ("9" * 9 + "d", "\u0662h")),
        *((parameters.line, text, 2, "must not be blank") for text in ("", " ", "\u200b")),
        *((parameters.line, f"a{bad}", 2, "charac") for bad in ("\u202e", "\nb", "\0", "\udcff", "x" * 255)),
    ],
)
def test_argument_is_read_or_is_bad_usage(kind, word, status, part, capsys):
    async def show(value: object) -> Answer:
        return Answer({"value": str(value)}, "a value", status=1)

    assert go(show, word, "--json", options=(click.Argument(["value"], type=kind),)) == status
    written = capsys.readouterr()
    assert part in (written.out if status == 1 else written.err)
    assert "\x1b" not in written.err


async def statuses(client: httpx.AsyncClient, uuid: str) -> set[int]:
    """Return how the firm's requests are answered: create, repeat, read, list, events."""
    paths = (f"request/{uuid}", f"request/{uuid}/events", "request", "request?external_id=case-1", "event")
    headers: tuple[dict[str, str], ...] = ({}, {"Idempotency-Key": "a"})
    answers = [await client.post("/v1/request", json=A_REQUEST, headers=each) for each in headers]
    answers += [await client.get(f"/v1/{path}") for path in paths]
    return {answer.status_code for answer in answers}


@pytest.fixture
def conveyancer(environment):
    """Runs `conveyancer` with these words."""
    return partial(run, "service", "conveyancer", environment=environment)


async def test_disabled_firm_is_refused_until_it_is_enabled(conveyancer, environment, client, database):
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    before = await statuses(client, created["uuid"])

    disable, show_all = ("disable", CONVEYANCER), ("list", "--json")
    disabled, listed, _, again = [await conveyancer(*each) for each in (disable, show_all) * 2]
    refused = await statuses(client, created["uuid"])
    requests = await database.fetchval("SELECT count(*) FROM calculation_request")
    by_link = await client.get(f"/v1/request/{created['uuid']}", headers=bearer(created["secret"]))
    by_token = await client.get(STRUCTURE)
    changed = await conveyancer("add", CONVEYANCER, "--name", "Acme and Sons")
    in_a_pod = {**environment, "LOGNAME": "Grace"}  # as deploy/operate.sh sets it
    enabled = await conveyancer("enable", CONVEYANCER, environment=in_a_pod)

    assert before == await statuses(client, created["uuid"]) == {200}
    assert (disabled.status, disabled.output) == (0, f"conveyancer {CONVEYANCER} disabled\n")
    assert (refused, requests) == ({403}, 3)
    assert (by_link.status_code, by_token.status_code) == (200, 200)
    assert json.loads(listed.output)[0]["disabled_at"] is not None
    assert again == listed, "with the first time"
    assert changed.output.endswith(", and still disabled\n")
    assert (enabled.status, enabled.output) == (0, f"conveyancer {CONVEYANCER} enabled\n")
    latest = "SELECT conveyancer_id, operator FROM operator_action ORDER BY id DESC LIMIT 1"
    assert await database.fetchrow(latest) == (CONVEYANCER, "Grace")


async def test_conveyancer_is_added_and_changed_which_is_listed_and_on_record(conveyancer, database):
    add = ("add", " new-firm", "--name")  # Spaces around an argument are left out.
    sons = "New & Sons"
    terms = [["New"], [" New ", "--charges-calculation-fee"], [sons, "--note", " a merger\u00a0"], [sons]]
    changes = [await conveyancer(*add, *each) for each in terms]
    listed = await conveyancer("list", "--json")

    new, charging = "'New', no calculation fee", "'New', a calculation fee"
    renamed = "'New & Sons', a calculation fee"
    shown = [new, f"{new} -> {charging}", f"{charging} -> {renamed}", f"{renamed} -> {renamed}"]
    announced = [f"conveyancer new-firm registered: {each}\n" for each in shown]
    assert [each.output for each in changes] == announced
    assert changes[3].errors == "", "nothing was changed"
    fees = {firm["id"]: firm["charges_calculation_fee"] for firm in json.loads(listed.output)}
    assert [*fees.items()] == [(CONVEYANCER, True), (FREE_CONVEYANCER, False), ("new-firm", True)]
    query = "SELECT conveyancer_id, action, subject, note FROM operator_action ORDER BY id"
    noted = zip(shown[:3], (None, None, "a merger"), strict=True)
    assert await database.fetch(query) == [("new-firm", "conveyancer add", *each) for each in noted]


async def test_usage_counts_a_month_in_utc_which_an_erasure_does_not_change(conveyancer, database):
    begins, minutes = datetime(2026, 1, 1, tzinfo=UTC), (0, 1, 1, 31 * 1440 - 1, 31 * 1440)
    requests = [new_request(calculation_fee_exempt=number == 1) for number in range(len(minutes))]
    for request in requests:
        await insert(database, request)
    async with database.transaction(), change(database, requests[2].id) as withdrawn:
        withdrawn.announce(RequestCalculated, calculation_id="C-1")
        withdrawn.announce(RequestWithdrawn)
    for request, passed in zip(requests, minutes, strict=True):
        move = "UPDATE event SET time = $2 WHERE request_id = $1"
        await database.execute(move, request.id, begins + timedelta(minutes=passed))
    before = await conveyancer("usage", "--json", "--month", "2026-01")
    async with database.transaction():
        await erasing.erase(database, [requests[1].id, requests[2].id])

    after = await conveyancer("usage", "--json", "--month", "2026-01")
    current = await conveyancer("usage", "--json")

    acme, free = json.loads(before.output)
    counted = {"requests": 4, "fee_exempt": 1, "calculated": 1, "withdrawn": 1, "erased": 0}
    assert acme == {"conveyancer": CONVEYANCER, "name": "Acme", "month": "2026-01", **counted}
    assert free["requests"] == 0
    assert after == before
    now = {**dict.fromkeys(counted, 0), "month": f"{datetime.now(UTC):%Y-%m}", "erased": 2}
    assert json.loads(current.output)[0] == acme | now


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


async def test_token_is_accepted_and_an_unusable_key_is_named(environment, client, issuer, tmp_path):
    key = tmp_path / "key.pem"
    sign = partial(run, "service", "token", CONVEYANCER, "--key", str(key), environment=environment)
    key.write_bytes(issuer.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    signed = await sign()
    response = await client.post("/v1/request", json=A_REQUEST, headers=bearer(signed.output.strip()))
    assert (signed.status, response.status_code) == (0, 200)

    public = issuer.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for unusable in (public, b"zqmark"):
        key.write_bytes(unusable)
        assert await sign() == Ended(1, "", f"--key {key}: not a readable EC P-256 private key\n")
