"""`python -m service` and `python -m worker`, as operators use them: results and errors.

They run in this process; that a process ends in the same way is shown once for each.
"""

import json
import re
import socket

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from yarl import URL

from deploy.local.machine.ports import free_port
from service.postgres.schema import VERSION
from tests.end_to_end.callers import another_request
from tests.harness.command_line import call, run
from tests.harness.examples import CONVEYANCER, FREE_CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.processes import Ended, bare_environment, environment_of, run_process

STRUCTURE = "/v1/questionnaire/structure"
A_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


async def test_conveyancer_that_is_added_is_listed(environment):
    command = ("service", "conveyancer", "add", "new-firm", "--name", "New Firm")
    added = await run(*command, environment=environment)
    await run(*command, "--charges-calculation-fee", environment=environment)
    listed = await run("service", "conveyancer", "list", environment=environment)
    for_scripts = await run("service", "conveyancer", "list", "--json", environment=environment)

    assert added == Ended(0, "conveyancer new-firm registered: 'New Firm', no calculation fee\n", "")
    assert [(firm["id"], firm["charges_calculation_fee"]) for firm in json.loads(for_scripts.output)] == [
        (CONVEYANCER, True),
        (FREE_CONVEYANCER, False),
        ("new-firm", True),
    ]
    assert listed.output.splitlines()[-1].split() == ["new-firm", "New", "Firm", "True", "-"]


async def test_change_of_a_conveyancer_keeps_its_fee_and_is_shown_and_on_record(environment, database):
    words = ("service", "conveyancer", "add", CONVEYANCER, "--name", "Acme and Sons", "--note", "a merger")
    changed = await run(*words, environment=environment)
    again = await run(*words, environment=environment)
    free = await run(*words, "--no-charges-calculation-fee", environment=environment)

    renamed = "'Acme', a calculation fee -> 'Acme and Sons', a calculation fee"
    waived = "'Acme and Sons', a calculation fee -> 'Acme and Sons', no calculation fee"
    assert changed.output == f"conveyancer {CONVEYANCER} registered: {renamed}\n"
    assert again.output.count("'Acme and Sons', a calculation fee") == 2
    assert free.output == f"conveyancer {CONVEYANCER} registered: {waived}\n"
    rows = await database.fetch(
        "SELECT conveyancer_id, action, subject, note FROM operator_action ORDER BY id"
    )
    assert [tuple(row) for row in rows] == [
        (CONVEYANCER, "conveyancer add", change, "a merger") for change in (renamed, waived)
    ]


@pytest.mark.parametrize(
    "words",
    [
        ("conveyancer", "disable", "\udcff"),
        ("conveyancer", "enable", "\udcff"),
        ("api-key", "create", "\udcff"),
        ("api-key", "revoke", "\udcff"),
        ("request", "find", "--external-id", "\udcff"),
        ("request", "find", "--customer-email", "\udcff"),
        ("request", "find", "--case-ref", "\udcff"),
        ("request", "correct", "req_0000000000000000000000", "--customer-email", "\udcff@example.com"),
    ],
    ids=ascii,
)
async def test_argument_that_is_not_utf_8_is_bad_usage(environment, words):
    ended = await run("service", *words, environment=environment)

    assert (ended.status, ended.output) == (2, "")


@pytest.mark.parametrize(
    ("conveyancer_id", "name", "named"),
    [("new-firm\u202e", "New Firm", "'ID'"), ("new-firm", "", "'--name'")],
    ids=ascii,
)
async def test_conveyancer_with_an_unreadable_name_is_not_added(
    environment, database, conveyancer_id, name, named
):
    ended = await run(
        "service", "conveyancer", "add", conveyancer_id, "--name", name, environment=environment
    )

    assert (ended.status, ended.output) == (2, "")
    assert f"Invalid value for {named}" in ended.errors
    assert await database.fetchval("SELECT count(*) FROM conveyancer") == 2


async def test_api_key_opens_the_questionnaire_until_it_is_revoked(environment, service_settings):
    created = await run("service", "api-key", "create", CONVEYANCER, environment=environment)
    key = created.output.strip()
    async with api_client(service_settings, key) as caller:
        opened = await caller.get(STRUCTURE)
        prefix = key.split("_")[1]
        revoked = await run("service", "api-key", "revoke", prefix, environment=environment)
        closed = await caller.get(STRUCTURE)
    listed = await run("service", "api-key", "list", environment=environment)

    shown = listed.output.splitlines()[1].split()
    assert shown[:2] == [prefix, CONVEYANCER]
    assert [bool(A_TIME.fullmatch(time)) for time in shown[2:]] == [True, True]
    assert key not in listed.output
    assert created.status == revoked.status == 0
    assert opened.status_code == 200
    assert len(opened.json()["data"]["questionnaire"]) == 27
    assert closed.status_code == 401


async def test_schema_that_is_there_already_is_said_to_be(environment):
    ended = await run("service", "schema", "apply", environment=environment)

    assert ended.output == f"schema version {VERSION} is there already\n"


async def test_token_is_accepted(service_settings, issuer, tmp_path):
    key = tmp_path / "key.pem"
    key.write_bytes(issuer.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    signed = await run(
        "service", "token", CONVEYANCER, "--key", str(key), environment=environment_of(service_settings)
    )
    async with api_client(service_settings, signed.output.strip()) as caller:
        response = await caller.post("/v1/request", json=another_request())

    assert signed.status == 0
    assert response.status_code == 200


@pytest.mark.parametrize(
    "command", [("service", "schema", "apply"), ("service", "serve"), ("worker", "relay")], ids=" ".join
)
async def test_process_ends_like_the_command_in_this_process(command):
    ended = await run_process(*command, environment=bare_environment())

    assert ended == await run(*command, environment=bare_environment())
    _assert_one_clear_line(ended, "DATABASE_URL")


async def test_missing_right_of_the_database_user_is_named(environment, database):
    await database.execute("CREATE ROLE no_rights LOGIN PASSWORD 'made-up'")
    url = str(URL(environment["DATABASE_URL"]).with_user("no_rights").with_password("made-up"))
    try:
        ended = await run("service", "conveyancer", "list", environment=environment | {"DATABASE_URL": url})
    finally:
        await database.execute("DROP ROLE no_rights")

    _assert_one_clear_line(ended, "permission denied", "DATABASE_URL")


async def test_unknown_key_cannot_be_revoked(environment):
    ended = await run("service", "api-key", "revoke", "0" * 12, environment=environment)

    assert ended.status != 0
    assert "No valid API key" in ended.output + ended.errors


@pytest.mark.parametrize(
    ("words", "name"), [(("service", "serve"), "REQUEST_SECRET_KEYS"), (("worker",), "MAIL_FROM")]
)
def test_invalid_setting_is_named_but_not_shown(words, name, service_settings, worker_settings):
    port = str(free_port())
    usable = environment_of(worker_settings, HEALTH_PORT=port) | environment_of(service_settings, PORT=port)

    ended = call(*words, environment=usable | {name: "zqmark:tooshort"})

    _assert_one_clear_line(ended, name, hidden="zqmark")


async def test_port_in_use_is_named(service_settings, worker_settings):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        served = await run("service", "serve", environment=environment_of(service_settings, PORT=port))
        worked = await run("worker", environment=environment_of(worker_settings, HEALTH_PORT=port))

    _assert_one_clear_line(served, port)
    _assert_one_clear_line(worked, port)


async def test_host_that_does_not_exist_is_named(service_settings):
    environment = environment_of(service_settings, HOST="none.invalid")

    ended = await run("service", "serve", environment=environment)

    _assert_one_clear_line(ended, "none.invalid", "no such host")


async def test_token_needs_an_issuer_an_audience_and_a_key(service_settings, issuer, tmp_path):
    bad_key = tmp_path / "bad.pem"
    bad_key.write_text("zqmark")
    environment = environment_of(service_settings)

    nowhere = await run("service", "token", "firm", "--key", "none.pem", environment=environment)
    unreadable = await run("service", "token", "firm", "--key", str(bad_key), environment=environment)
    public_key = tmp_path / "public.pem"
    public_key.write_bytes(
        issuer.key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    public = await run("service", "token", "firm", "--key", str(public_key), environment=environment)
    unissued = await run("service", "token", "firm", "--key", "none.pem", environment=bare_environment())

    _assert_one_clear_line(nowhere, "none.pem")
    _assert_one_clear_line(unreadable, str(bad_key), hidden="zqmark")
    _assert_one_clear_line(public, str(public_key))
    _assert_one_clear_line(unissued, "AUTH_ISSUER")


def _assert_one_clear_line(ended: Ended, *named: str, hidden: str | None = None) -> None:
    """Check that a command failed with one line that names what is wrong without its value."""
    printed = ended.output + ended.errors
    assert ended.status not in (0, None)
    assert len(printed.splitlines()) == 1, printed
    for name in named:
        assert name in printed
    assert hidden is None or hidden not in printed
