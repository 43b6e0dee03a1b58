"""Both doctors, on real servers, with and without problems."""

import asyncio
import json
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import partial

import pytest
from aio_pika import Message
from yarl import URL

from deploy.local.machine.ports import free_port
from service.command_line import diagnosis
from service.commands.doctor import examine_service
from tests.harness import databases
from tests.harness.in_process import run
from tests.harness.loopback_server import AnsweringServer
from tests.harness.mail_server import ScriptedMailServer
from tests.harness.processes import environment_of
from tests.harness.queues import holds
from tests.harness.scripted_broker import ScriptedBroker
from tests.harness.standby import replicated
from tests.harness.waiting import eventually
from tests.worker.conftest import store
from tests.worker.steps import store_many
from worker.commands.doctor import examine_worker

# The variable of each server, and the scheme of its address.
SERVERS = {
    "postgres": ("DATABASE_URL", "postgresql"),
    "signing keys": ("AUTH_JWKS_URL", "https"),
    "rabbitmq": ("AMQP_URL", "amqp"),
    "mail server": ("SMTP_URL", "smtp"),
    "bounces": ("BOUNCES_URL", "imap"),
}
QUEUES = ["notifications", "calculation-results"]
CHECKS = {
    "service": ["postgres", "secret keys", "signing keys"],
    "worker": [
        *("postgres", "secret keys", "requests", "rabbitmq"),
        *(f"queue {name}{kind}" for kind in ("", ".dead-letters") for name in QUEUES),
        *("mail server", "bounces"),
    ],
}


@pytest.fixture
def environment(worker_settings, environment):
    """The environment of processes without problems, on this machine."""
    return environment_of(worker_settings) | environment


async def found(environment: Mapping[str, str], check: str, url: object = None) -> str:
    """Return what a check finds, in lines: state, fault, what to do. Its server may be at another *url*."""
    if url is not None:
        environment = {**environment, SERVERS[check][0]: str(url)}
    examine = examine_service if check in CHECKS["service"] else examine_worker
    findings = await examine(environment)
    return "\n".join(f"{each.state}: {each.says}; {each.do}" for each in findings if each.check == check)


@pytest.mark.parametrize("program", CHECKS)
async def test_healthy_environment_stays_as_it_was(
    environment, channel, database, mail_server, mailbox, program
):
    environment["BOUNCES_URL"] = mailbox.url
    if program == "service":  # It may also run in a pod of the API.
        environment["DATABASE_URL"] = environment["DATABASE_URL"].replace("_operator:", "_api:")
    for name in QUEUES:
        await (await channel.get_queue(name)).consume(asyncio.Queue().put)

    ended = await run(program, "doctor", environment=environment)

    assert (ended.status, ended.errors) == (0, "")
    lines = [tuple(re.split(" {2,}", each)[:2]) for each in ended.output.splitlines()]
    assert sorted(lines) == sorted(("ok", check) for check in CHECKS[program])
    assert await database.fetch("SELECT FROM operator_action") == mail_server.accepted == []


@pytest.mark.parametrize(("role", "since"), [("api", ""), ("operator", ", since 20.*")])
async def test_transaction_that_holds_back_feeds_is_named(environment, database, database_url, role, since):
    async with databases.connected(databases.as_role(database_url, role)) as holder:
        await holder.execute("SET application_name = 'psql'; BEGIN; SELECT pg_current_xact_id()")
        named = f"pid {holder.get_server_pid()}, application psql, user {databases.user_of(role)}"
        await store(database)
        await database.execute("UPDATE event SET time = now() - interval '90 seconds'")

        says = await found(environment, "feed")

    assert re.match(f"warning: held back for 9. s by {named}{since}; see", says)


async def test_command_says_what_is_wrong_and_prints_no_secret(environment):
    address = f"me:hunter2@127.0.0.1:{free_port()}"
    environment |= {name: f"{scheme}://{address}" for name, scheme in SERVERS.values()}

    ended = await run("worker", "doctor", "--json", environment=environment)

    wrong = {each["check"]: each["says"] for each in json.loads(ended.output) if each["state"] == "wrong"}
    assert [*wrong] == ["postgres", "requests", "rabbitmq", "mail server", "bounces"]
    assert all("connection refused" in says for says in wrong.values())
    assert (ended.status, ended.errors, "hunter2" in ended.output) == (1, "", False)


@pytest.mark.parametrize(
    ("check", "part", "value", "says"),
    [
        ("postgres", "user", "nobody-here", "it rejects the login"),
        ("rabbitmq", "password", "hunter2", "it refuses: ACCESS_REFUSED - Login was refused"),
        ("rabbitmq", "scheme", "amqps", r"TLS fails \(WRONG_VERSION_NUMBER\): is this its port for TLS\?"),
        ("mail server", "scheme", "smtp+starttls", "SMTPException"),  # It does not offer STARTTLS.
    ],
)
async def test_server_that_cannot_be_used_is_found(environment, check, part, value, says):
    url = URL(environment[SERVERS[check][0]])

    finding = await found(environment, check, getattr(url, f"with_{part}")(value))

    assert re.match(f"wrong: (Postgres at DATABASE_URL is unavailable: )?{says}.*; ", finding)


async def test_no_check_waits_long_for_a_server_that_falls_silent(environment, broker_link, monkeypatch):
    monkeypatch.setattr(diagnosis, "CHECK_SECONDS", 3.0)
    broker_link.hold_before(b"notifications")
    async with asyncio.timeout(12), AnsweringServer(None) as server:
        environment |= {name: f"{scheme}://127.0.0.1:{server.port}" for name, scheme in SERVERS.values()}
        environment["AMQP_URL"] = broker_link.url
        of_both = await asyncio.gather(examine_service(environment), examine_worker(environment))

    findings = [finding for found_by_one in of_both for finding in found_by_one]
    silent = {each.check for each in findings if each.says == "no answer in time"}
    assert silent == {"requests"} | SERVERS.keys()
    states = [each.state for each in findings if each.check == "rabbitmq"]
    assert states == ["ok", "wrong"], "what is known is shown"


async def test_alarm_of_rabbitmq_is_found(environment):
    async with ScriptedBroker() as broker:
        broker.reading.clear()
        environment["AMQP_URL"] = broker.url

        says = await found(environment, "publishing")

    assert says == "wrong: RabbitMQ blocks publishers; see BrokerBlocked in the runbook"


FULL_DISK = """
    CREATE FUNCTION full_disk() RETURNS void LANGUAGE plpgsql AS
    $$ BEGIN RAISE disk_full USING MESSAGE = 'No space left'; END $$;
    CREATE RULE full_disk AS ON INSERT TO outbox DO INSTEAD SELECT full_disk()
"""
OLDER = "schema is older than this release needs: run"
LOCKED = "Another transaction has locked the same rows"


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("DELETE FROM schema_version", OLDER),
        ("DROP TABLE schema_version", OLDER),
        ('ALTER DATABASE "{}" SET default_transaction_read_only = on', "takes no writes: is it a standby"),
        (FULL_DISK, "is unavailable: No space left"),
        ("BEGIN; LOCK TABLE calculation_request", LOCKED),
        ("BEGIN; LOCK TABLE outbox", LOCKED),
        ("REVOKE INSERT ON outbox FROM calculation_requests_operator", "Postgres refused: permission denied"),
    ],
    ids=["older schema", "no schema", "read-only", "full disk", "locked", "outbox locked", "no right"],
)
async def test_postgres_that_cannot_be_written_to_is_found(environment, database, statement, says):
    name = await database.fetchval("SELECT current_database()")
    await database.execute(statement.format(name))

    assert re.match(f"wrong: .*{says}", await found(environment, "postgres"))


async def test_commits_that_wait_for_a_standby_are_found_and_the_rest_is_printed(environment):
    async with replicated() as servers:
        url = databases.as_role(servers.primary_url, "operator")
        before = await found(environment, "postgres", url)
        await servers.cut_off()
        findings = await examine_worker({**environment, "DATABASE_URL": url})

    assert before.startswith("ok: ")
    after = [(each.state, each.says[:20]) for each in findings if each.check in ("postgres", "requests")]
    assert after == [("wrong", "its commits wait"), ("ok", "each has its e-mail ")]


async def test_missing_keys_and_another_one_under_the_same_name_are_found(environment, database):
    requests = await store_many(database, 2_100)
    before = await found(environment, "secret keys")
    used = [requests[0].secret_key_id] * 2_100
    used[0], used[1_000:1_100] = "oldest", ["middle"] * 100
    times = (timedelta(hours=2_100 - place) for place in range(2_100))
    ids = (each.id for each in requests)
    await database.executemany(
        "UPDATE calculation_request SET created_at = now() - $2::interval, secret_key_id = $3 WHERE id = $1",
        list(zip(ids, times, used, strict=True)),
    )
    environment["REQUEST_SECRET_KEYS"] = f"{used[1].partition('.')[0]}:{'C' * 43}"

    says = (await found(environment, "secret keys")).splitlines()

    assert before.startswith("ok: has every key that requests need")
    assert [line.partition(";")[0] for line in says] == [
        f"wrong: stored requests need {key}, which is missing" for key in (used[1], "middle", "oldest")
    ]


async def test_customer_without_an_email_is_found(environment, database, stored_request):
    await database.execute("DELETE FROM outbox")
    await database.execute("UPDATE calculation_request SET created_at = now() - interval '1 hour'")

    says = await found(environment, "request_without_email")
    assert re.match(f"wrong: 1 requests: .*{stored_request.uuid}", says)


async def test_missing_queue_messages_that_nobody_reads_and_dead_letters_are_found(environment, channel):
    missing, live = QUEUES
    dead = f"{live}.dead-letters"
    await channel.queue_delete(missing)
    unread = await found(environment, f"queue {live}")
    for queue in (live, dead):
        await channel.default_exchange.publish(Message(b"message"), queue)
        await eventually(partial(holds, channel, queue, 1))

    lines = [await found(environment, f"queue {name}") for name in (missing, live, dead)]

    assert [line.partition(";")[0] for line in (unread, *lines)] == [
        *("warning: 0 messages, 0 consumers", "wrong: missing"),
        *("wrong: 1 messages, 0 consumers", "warning: 1 messages"),
    ]


@pytest.mark.parametrize(
    ("command", "answer", "line"),
    [
        ("MAIL", b"550 Not you", "wrong: it answers 550 Not you (SMTPSenderRefused)"),
        (
            "RCPT",
            b"450-4.1.8 <us@\x1b[1m>: Sender address rejected\r\n450 4.1.8 Domain not found",
            "wrong: it answers 450 4.1.8 <us@\\x1b[1m>: Sender address rejected",
        ),
        ("RCPT", b"550 5.1.1 No such user", "ok: accepts MAIL_FROM"),
        ("RCPT", b"451 4.7.1 Greylisted", "ok: accepts MAIL_FROM"),
    ],
)
async def test_refusing_mail_server_is_found(environment, command, answer, line):
    async with ScriptedMailServer() as server:
        server.replies[command] = answer

        assert (await found(environment, "mail server", server.url)).startswith(line)


async def test_keys_of_the_issuer_that_are_not_usable_are_named(environment, own_issuer):
    [key] = json.loads(own_issuer.jwks.read_bytes())["keys"]
    found_in = []
    for published in ([key | {"use": "enc"}, key], [key | {"kid": "odd", "crv": "P-521"}, key], [None]):
        own_issuer.jwks.write_text(json.dumps({"keys": published}))
        says = await found(environment, "signing keys", own_issuer.jwks.as_uri())
        found_in.append([line.partition(";")[0] for line in says.splitlines()])

    usable = "ok: fetched, and at least one is usable"
    assert found_in == [
        [usable],
        [usable, "warning: not usable: {'odd': 'Coords should be 66 bytes for curve P-521'}"],
        ["warning: not usable: {'(no kid)': 'Expected `object`, got `null`'}", "wrong: PyJWKSetError"],
    ]


async def test_mailbox_of_bounces_that_is_not_set_or_unreadable_is_named(environment, mailbox):
    unset = await found(environment, "bounces")
    refused = await found(environment, "bounces", mailbox.url.replace("INBOX", "Elsewhere"))

    assert unset.startswith("warning: unknown: BOUNCES_URL is not set; ")
    assert refused.startswith("wrong: the IMAP server refuses or sends too much: does the folder exist")
