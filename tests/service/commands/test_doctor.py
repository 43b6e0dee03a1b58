"""`python -m service doctor` on real servers. What it finds of Postgres, the worker's doctor finds too."""

import asyncio
import json
from collections.abc import Mapping

import pytest
from yarl import URL

from deploy.local.machine.ports import free_port
from service import diagnosis
from service.calculation_requests.request_secrets import SecretKeyRing, remember_keys
from service.commands.doctor import examine_service
from service.diagnosis import Finding
from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST
from tests.harness.fixed_answers import answering, http_answer
from tests.harness.processes import environment_of

CHECKS = ["settings", "postgres", "secret keys", "application", "signing keys"]


@pytest.fixture
async def environment(service_settings):
    """The environment of an API without problems."""
    async with answering(http_answer("404 Not Found", b"")) as port:
        yield environment_of(service_settings, APP_URL=f"http://127.0.0.1:{port}")


async def found(environment: Mapping[str, str], check: str) -> Finding:
    """Return the finding of one check."""
    [finding] = [finding for finding in await examine_service(environment) if finding.check == check]
    return finding


async def test_healthy_environment_has_a_line_for_each_check_and_is_not_changed(environment, database):
    ended = await run("service", "doctor", environment=environment)

    assert (ended.status, ended.errors) == (0, "")
    assert [line.split("  ")[0] for line in ended.output.splitlines()] == ["ok"] * len(CHECKS)
    assert [finding.check for finding in await examine_service(environment)] == CHECKS
    traces = "SELECT (SELECT count(*) FROM operator_action) + (SELECT count(*) FROM secret_key)"
    assert await database.fetchval(traces) == 0


async def test_command_says_what_is_wrong_first_and_prints_no_secret(environment):
    environment["DATABASE_URL"] = f"postgresql://me:hunter2@127.0.0.1:{free_port()}/x"
    environment["AUTH_JWKS_URL"] = f"https://me:hunter2@127.0.0.1:{free_port()}/jwks"
    environment["REQUEST_SECRET_KEYS"] = "current:hunter2"
    environment["APP_URL"] = "hunter2"

    ended = await run("service", "doctor", "--json", environment=environment)

    states = [(finding["check"], finding["state"]) for finding in json.loads(ended.output)]
    assert states == [
        ("settings", "wrong"),  # APP_URL
        ("settings", "wrong"),  # REQUEST_SECRET_KEYS
        ("postgres", "wrong"),
        ("signing keys", "wrong"),
        ("application", "warning"),  # not checked without APP_URL
    ]
    assert (ended.status, ended.errors) == (1, "")
    assert "hunter2" not in ended.output


async def test_checks_run_side_by_side_and_wait_for_no_silent_server(environment, authority, monkeypatch):
    monkeypatch.setattr(diagnosis, "CHECK_SECONDS", 1.0)
    async with answering(None) as one, answering(None, authority.server_context()) as other:
        environment["DATABASE_URL"] = f"postgresql://127.0.0.1:{one}/x"
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{other}/jwks"

        async with asyncio.timeout(1.8):
            findings = await examine_service(environment)

    silent = [finding.check for finding in findings if finding.says == "no answer in time"]
    assert silent == ["postgres", "signing keys"]


async def test_watching_doctor_looks_again_and_again(monkeypatch, capsys):
    monkeypatch.setattr(diagnosis, "WATCH_SECONDS", 0.01)
    looks = iter([Finding("wrong", "postgres", "connection refused"), Finding("ok", "postgres", "is back")])

    async def examine() -> list[Finding]:
        return [next(looks)]

    with pytest.raises(RuntimeError):  # when there are no more
        await diagnosis.answer(examine, watch=True)

    assert capsys.readouterr().out.splitlines() == [
        "wrong    postgres  connection refused",
        "ok       postgres  is back",
    ]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"port": 1}, "connection refused"),
        ({"host": "nowhere.invalid"}, "unknown host"),
        ({"path": "/no-such-database"}, "no such database"),
        ({"user": "nobody-here"}, "user or password refused"),
    ],
)
async def test_unavailable_postgres_is_found(environment, changes, says):
    url = URL(environment["DATABASE_URL"])
    for part, value in changes.items():
        url = getattr(url, f"with_{part}")(value)
    environment["DATABASE_URL"] = str(url)

    finding = await found(environment, "postgres")

    assert (finding.state, finding.says) == ("wrong", says)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM schema_version", "its schema is too old, or there is none"),
        ("DROP TABLE schema_version", "its schema is too old, or there is none"),
        ('ALTER DATABASE "{database}" SET default_transaction_read_only = on', "it takes no writes"),
        (
            "CREATE RULE full_disk AS ON INSERT TO operator_action DO INSTEAD SELECT full_disk()",
            "its disk is full",
        ),
        (
            "BEGIN; LOCK TABLE calculation_request IN SHARE MODE",
            "another session has locked its tables",
        ),
    ],
    ids=["older schema", "no schema", "read-only", "full disk", "locked"],
)
async def test_postgres_that_cannot_be_written_to_is_found(environment, database, statement, says):
    await database.execute(
        """
        CREATE FUNCTION full_disk() RETURNS void LANGUAGE plpgsql AS $$
        BEGIN
            RAISE EXCEPTION USING ERRCODE = 'disk_full';
        END $$
        """
    )
    name = await database.fetchval("SELECT current_database()")
    await database.execute(statement.format(database=name))

    finding = await found(environment, "postgres")

    assert finding.state == "wrong"
    assert finding.says.startswith(says)


async def test_missing_keys_and_another_key_under_the_same_id_are_found(environment, client, database):
    assert (await client.post("/v1/request", json=A_REQUEST)).status_code == 200
    known = SecretKeyRing.parse(environment["REQUEST_SECRET_KEYS"])
    assert await remember_keys(database, known) == []
    before = await found(environment, "secret keys")
    await database.execute("UPDATE calculation_request SET secret_key_id = 'newest'")
    await remember_keys(database, SecretKeyRing.parse(f"of-workers:{'B' * 43}"))
    environment["REQUEST_SECRET_KEYS"] = f"{known.current_id}:{'C' * 43},older:{'B' * 43}"

    findings = [each for each in await examine_service(environment) if each.check == "secret keys"]

    assert (before.state, before.says) == ("ok", "has every key that was in use before")
    assert [(finding.state, finding.says) for finding in findings] == [
        ("wrong", f"another key than before has the id {known.current_id}"),
        ("wrong", "stored requests need newest, which is missing"),
        ("wrong", "stored requests need of-workers, which is missing"),
    ]


@pytest.mark.parametrize(
    ("answer", "state", "says"),
    [
        (http_answer("200 OK", b""), "ok", "APP_URL is served"),
        (http_answer("503 Service Unavailable", b""), "wrong", "it answers 503"),
        (None, "warning", "no answer in time"),
        ("nobody listens", "wrong", "connection refused"),
    ],
)
async def test_application_is_asked(environment, monkeypatch, answer, state, says):
    monkeypatch.setattr(diagnosis, "APP_SECONDS", 0.3)
    async with answering(answer) as port:
        asked = free_port() if answer == "nobody listens" else port
        finding = await found(environment | {"APP_URL": f"http://127.0.0.1:{asked}/"}, "application")

    assert (finding.state, finding.says) == (state, says)


async def test_issuer_may_be_slower_than_callers_wait(environment, issuer, authority):
    answer = http_answer("200 OK", issuer.jwks.read_bytes())
    async with answering(answer, authority.server_context(), after_seconds=1.5) as port:
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{port}/jwks"

        finding = await found(environment, "signing keys")

    assert finding.state == "ok"


@pytest.mark.parametrize(
    ("days", "address", "answer", "says"),
    [
        (365, "127.0.0.1", http_answer("404 Not Found", b""), "HTTP status 404"),
        (365, "127.0.0.1", http_answer("200 OK", b'{"keys": []}'), "SigningKeysUnavailable"),
        (-1, "127.0.0.1", b"", "certificate has expired"),
        (365, "127.0.0.2", b"", "IP address mismatch"),
    ],
)
async def test_missing_signing_keys_and_a_bad_certificate_are_found(
    environment, authority, days, address, answer, says
):
    context = authority.server_context(days=days, address=address)
    async with answering(answer, context) as port:
        environment["AUTH_JWKS_URL"] = f"https://127.0.0.1:{port}/jwks"

        finding = await found(environment, "signing keys")

    assert finding.state == "wrong"
    assert says in finding.says
