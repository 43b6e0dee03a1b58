"""The worker as a whole: its settings, its start, its roles and its end."""

import msgspec
import pytest

from deploy.local.machine.ports import free_port
from service.settings import InvalidSetting, load
from tests.harness.databases import failing_for_all_roles
from tests.harness.examples import SECRET_KEYS
from tests.harness.in_process import call, worker_probes
from tests.harness.metrics import value
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually
from tests.worker.conftest import settings_with, store
from worker.mail.message import Sender
from worker.process import ROLES
from worker.settings import EmailSettings, ProcessSettings, WorkerSettings


async def is_ready(probes, *roles: str):
    return (await probes.get("/readyz")).json() == dict.fromkeys(("postgres", *roles), "ok")


async def test_worker_with_one_role_runs_no_other_and_begins_again_when_it_fails_unexpectedly(
    worker_settings, mail_server, database, stored_request
):
    failures = value("background_failures_total", work="relay")

    async def is_relayed() -> bool:
        return bool(await database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    async with worker_probes(worker_settings, "relay") as probes:
        await eventually(lambda: is_ready(probes, "relay"))
        await eventually(is_relayed)
        await database.execute(failing_for_all_roles("outbox"))
        await eventually(lambda: value("background_failures_total", work="relay") > failures)
        await database.execute("ALTER TABLE outbox DISABLE ROW LEVEL SECURITY")
        await store(database)
        await eventually(is_relayed)

    assert mail_server.accepted == []
    assert await database.fetchval("SELECT max(sequence) FROM calculation_request") == stored_request.sequence


async def test_worker_starts_without_broker_and_is_not_ready(worker_settings, logs):
    settings = settings_with(worker_settings, amqp_url=f"amqp://guest:guest@127.0.0.1:{free_port()}/")
    says = "RabbitMQ at AMQP_URL is unavailable: connection refused"

    async with worker_probes(settings) as probes:

        async def each_role_says_so() -> bool:
            answer = (await probes.get("/readyz")).json()
            return {answer[name] for name, role in ROLES.items() if "rabbitmq" in role.servers} == {says}

        await eventually(each_role_says_so)
        metrics = (await probes.get("/metrics")).text

    assert [name for name, role in ROLES.items() if f"\n{role.liveness} " not in metrics] == []
    assert {line["log_level"] for line in logs} == {"info", "warning"}, "no outage is an error of the worker"
    assert logs[-1]["event"] == "worker_stopped"


async def test_worker_waits_for_the_schema_and_starts_nothing_if_it_is_stopped_meanwhile(
    worker_settings, database, logs
):
    await database.execute("ALTER TABLE schema_version RENAME TO elsewhere")

    async with worker_probes(worker_settings):
        await eventually(lambda: "worker_waits_for_schema" in str(logs))
    assert [line["event"] for line in logs][-2:] == ["worker_stopping", "worker_stopped"]
    assert "worker_started" not in str(logs)

    async with worker_probes(worker_settings, "relay") as probes:

        async def says_why() -> bool:
            answer = (await probes.get("/readyz")).json()
            return bool(answer["postgres"].startswith("The database schema is older"))

        await eventually(says_why)
        await database.execute("ALTER TABLE elsewhere RENAME TO schema_version")
        await eventually(lambda: is_ready(probes, "relay"))


async def test_fatal_failure_is_logged_and_ends_the_process(worker_settings, database, tmp_path):
    await database.execute(
        "DROP TABLE schema_version; CREATE VIEW schema_version AS SELECT 1 / 0 AS version, '' AS fingerprint;"
        "GRANT SELECT ON schema_version TO PUBLIC"
    )
    process = worker_process(worker_settings, tmp_path, "relay")

    async with started(process, ready=False):
        assert await process.exit_status() == 1

    last = msgspec.json.decode(process.output.splitlines()[-1])
    why = {"event": "worker_failed", "level": "critical", "error": "DivisionByZeroError", "sqlstate": "22012"}
    assert last == last | why


ENVIRONMENT = {
    "DATABASE_URL": "postgresql://127.0.0.1/calculations",
    "APP_URL": "https://app.example.com",
    "REQUEST_SECRET_KEYS": SECRET_KEYS,
    "AMQP_URL": "amqp://127.0.0.1/",
    "SMTP_URL": "smtp://127.0.0.1:2525",
    "MAIL_FROM": "Calculations <calculations@service.example.com>",
}


def test_required_settings_are_sufficient():
    assert load(EmailSettings, ENVIRONMENT).relay_poll_seconds == 1.0
    load(ProcessSettings, {"DATABASE_URL": ENVIRONMENT["DATABASE_URL"]})  # of a role without RabbitMQ


@pytest.mark.parametrize("name", ["APP_URL", "REQUEST_SECRET_KEYS", "SMTP_URL", "MAIL_FROM"])
def test_only_the_role_that_sends_emails_needs_what_e_mails_need(name):
    given = {each: value for each, value in ENVIRONMENT.items() if each != name}

    load(WorkerSettings, given)
    ended = [call("worker", *roles, environment=given) for roles in (["notifications"], [])]

    assert {(one.status, one.errors) for one in ended} == {(1, f"missing environment variable {name}\n")}


def test_invalid_setting_is_named_and_not_shown():
    for name, given in [
        ("AMQP_URL", "http://user:hunter2@127.0.0.1/"),
        ("AMQP_URL", "amqp://user:hunter2#x@127.0.0.1/"),
        ("SMTP_URL", "smtp://user:hunter2#x@127.0.0.1:25"),
        ("EMAIL_CONCURRENCY", "1000"),
        ("RETENTION_DAYS", "29"),
        ("CONSUMER_PREFETCH", "65536"),
    ]:
        with pytest.raises(InvalidSetting, match=f"^{name}: ") as invalid:
            load(EmailSettings, {**ENVIRONMENT, name: given})
        assert "hunter2" not in str(invalid.value)


def test_urls_of_every_form_are_accepted():
    for name, url in [
        ("AMQP_URL", "amqps://user:p%23s@rabbit.example:5671/vhost?heartbeat=5"),
        ("AMQP_URL", "amqp://guest:guest@[::1]:5672/%2F"),
        ("SMTP_URL", "smtp+starttls://user%40example.com:p%2Fs@mail.example:587"),
        ("SMTP_URL", "smtp://[::1]:25"),
        ("DATABASE_URL", "postgresql:///calculations?host=/run/postgresql"),
        ("DATABASE_URL", "postgres://user:p%23s@one:5432,two:5432/calculations"),
    ]:
        assert getattr(load(EmailSettings, {**ENVIRONMENT, name: url}), name.lower()) == url


def test_sender_may_have_a_name_and_an_international_domain_and_an_invalid_one_is_named_and_not_shown():
    for text, *sender in [
        ("calc@example.com", "", "calc@example.com"),
        ("Calc <calc@example.com>", "Calc", "calc@example.com"),
        ('"Calc, Inc." <calc@example.com>', "Calc, Inc.", "calc@example.com"),
        ("Calc <calc@bücher.example>", "Calc", "calc@xn--bcher-kva.example"),
    ]:
        assert Sender.parse(text) == Sender(*sender)

    for text in ("Calc", "a@b.example, c@d.example", "Calc <>", "@example.com", "a b@example.com"):
        with pytest.raises(InvalidSetting, match=r"^MAIL_FROM: ") as invalid:
            Sender.parse(text)
        assert text not in str(invalid.value)
