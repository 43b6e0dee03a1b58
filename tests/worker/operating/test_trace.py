"""`trace` and `reconcile`: where one request stands, and whether all of them add up."""

import asyncio
import json
from datetime import timedelta

import pytest

from service.calculation_requests import reading
from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection, Pool
from tests.harness.in_process import running
from tests.harness.mail_server import MailServer
from tests.harness.waiting import eventually
from tests.worker.conftest import KEYS, announce_next, hold_events, store
from tests.worker.operating.test_commands import command
from worker.consumers import calculations, notifications
from worker.mail import ledger
from worker.mail.postman import Postman
from worker.operating.trace import Trace
from worker.reconciliation import checks
from worker.reconciliation.checks import Limits, Reconciliation
from worker.relay.loop import Relay
from worker.relay.publisher import Publisher
from worker.settings import WorkerSettings

NEVER = asyncio.Event()


async def trace_of(settings: WorkerSettings, request: CalculationRequest) -> Trace:
    """Return what `trace` answers; nothing of it may be personal or secret."""
    answer = await command(settings, "trace", request.uuid)
    said = answer.rendered(as_json=False) + answer.rendered(as_json=True)
    assert "@" not in said
    assert request.secret(KEYS) not in said
    assert request.customer_last_name not in said
    assert isinstance(answer.data, Trace)
    assert answer.text.splitlines()[:2] == [request.uuid, answer.data.conclusion]
    return answer.data


def states(trace: Trace) -> list[tuple[str, int | None, str]]:
    """Return how far each event is."""
    return [(event.type, event.sequence, event.state) for event in trace.events]


async def deliver(relay: Relay, publisher: Publisher) -> None:
    """Relay until nothing moves any more."""
    while await relay.relay_due(publisher, NEVER):
        pass


async def intend(database: Connection, request: CalculationRequest) -> None:
    """Write down that the e-mail of a request is to be sent."""
    await ledger.intend(database, f"{request.uuid}.request.created.1", request.id)


async def settle(database: Connection, postman: Postman) -> None:
    """Send every e-mail that is due, whatever comes of it."""
    async with running(postman.run):
        await eventually(lambda: database.fetchval("SELECT bool_and(attempts > 0) FROM email"))


async def calculate(database: Connection, request: CalculationRequest) -> None:
    """Record a calculation, as its consumer does."""
    async with database.transaction():
        locked = await reading.lock(database, request.id)
        await calculations.set_calculation(database, locked, "C-1", traceparent=None)


async def test_request_that_was_just_stored_has_its_event_pending(
    worker_settings: WorkerSettings, stored_request: CalculationRequest
) -> None:
    trace = await trace_of(worker_settings, stored_request)

    assert states(trace) == [("request.created", 1, "pending")]
    assert trace.stored_at == stored_request.created_at
    assert trace.tenant == stored_request.conveyancer_id
    assert trace.conclusion == "request.created has not left for RabbitMQ: it is pending."


async def test_event_that_is_held_or_parked_is_told_with_its_error(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await announce_next(database, stored_request.id)
    await hold_events(database, stored_request.id)
    await database.execute(
        """
        UPDATE outbox_held
           SET attempts = 10, parked_at = now(), last_error = 'refused by the broker'
         WHERE sequence = 1
        """
    )

    answer = await command(worker_settings, "trace", stored_request.uuid)

    trace = await trace_of(worker_settings, stored_request)
    assert states(trace) == [("request.created", 1, "parked"), ("request.email_sent", 2, "waiting")]
    assert "event 1, parked after 10 attempts since 20" in answer.text
    assert "refused by the broker" in answer.text


async def test_request_whose_event_is_published_waits_for_its_email_to_be_noted(
    worker_settings: WorkerSettings, relay: Relay, publisher: Publisher, stored_request: CalculationRequest
) -> None:
    await deliver(relay, publisher)

    trace = await trace_of(worker_settings, stored_request)

    assert states(trace) == [("request.created", 1, "published")]
    assert trace.email is None
    assert trace.conclusion.startswith("request.created was published, and no e-mail is noted yet")


async def test_email_that_the_mail_server_postpones_is_told_with_its_reply_but_no_address(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    mail_server.rcpt_reply = "451 4.7.1 <ada@customer.example.com>: greylisted"
    await intend(database, stored_request)
    await settle(database, postman)

    trace = await trace_of(worker_settings, stored_request)

    assert trace.email is not None
    assert trace.email.state == "pending"
    assert trace.email.attempts >= 1
    assert trace.email.next_attempt_at is not None
    assert trace.email.server_reply == "451 4.7.1 <[address]>: greylisted"
    assert trace.conclusion == "The e-mail has yet to be accepted by the mail server."


async def test_email_that_was_refused_is_told(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    mail_server: MailServer,
    stored_request: CalculationRequest,
) -> None:
    mail_server.rcpt_reply = "550 5.1.1 no such user"
    await intend(database, stored_request)
    await settle(database, postman)

    trace = await trace_of(worker_settings, stored_request)

    assert states(trace)[1] == ("request.email_failed", 2, "pending")
    assert trace.conclusion == "The e-mail ended unsent: refused."


async def test_request_is_told_from_its_row_to_its_calculation(
    worker_settings: WorkerSettings,
    database: Connection,
    postman: Postman,
    stored_request: CalculationRequest,
) -> None:
    await intend(database, stored_request)
    await settle(database, postman)
    before = await trace_of(worker_settings, stored_request)
    await calculate(database, stored_request)
    await database.execute("DELETE FROM outbox WHERE sequence < 3")

    trace = await trace_of(worker_settings, stored_request)

    assert before.conclusion == "The mail server has the e-mail; no calculation has come yet."
    assert states(trace) == [
        ("request.created", 1, "published"),
        ("request.email_sent", 2, "published"),
        ("request.calculated", 3, "pending"),
    ]
    assert trace.email is not None
    assert (trace.email.state, trace.email.server_reply) == ("sent", "OK accepted")
    assert trace.calculation_id == "C-1"
    assert trace.calculated_at is not None
    assert trace.conclusion == "It has its calculation."


async def test_trace_is_text_for_people_in_the_order_of_time(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await calculate(database, stored_request)
    await database.execute(
        "UPDATE calculation_request SET updated_at = updated_at + interval '1 h', calculation_sequence = NULL"
    )
    await database.execute("DELETE FROM outbox")

    text = (await command(worker_settings, "trace", stored_request.uuid)).text

    assert [line.split("  ")[0] for line in text.splitlines()[3:]] == [
        "what",
        "stored",
        "request.created",
        "request.calculated",
        "calculation",
    ]


@pytest.fixture
async def settled(database: Connection, postman: Postman) -> CalculationRequest:
    """A request with everything done and delivered."""
    request = await store(database)
    await intend(database, request)
    await settle(database, postman)
    await calculate(database, request)
    await database.execute("DELETE FROM outbox")
    return request


async def reconciled(database: Connection, *, email_seconds: float = 3600.0) -> Reconciliation:
    """Compare everything."""
    return await checks.reconcile(database, Limits(email_seconds=email_seconds))


def anomalies(found: Reconciliation) -> dict[str, int]:
    """Return how often each anomaly was found, those not found left out."""
    return {anomaly.name: anomaly.count for anomaly in found.anomalies if anomaly.count}


async def make_old(database: Connection) -> None:
    """Let an hour and a minute pass for everything."""
    for statement in (
        "UPDATE calculation_request SET created_at = created_at - interval '61 min'",
        "UPDATE outbox SET created_at = created_at - interval '61 min'",
        "UPDATE outbox_held SET created_at = created_at - interval '61 min'",
        "UPDATE email SET created_at = created_at - interval '61 min'",
    ):
        await database.execute(statement)


async def test_everything_adds_up_when_all_is_done(
    worker_settings: WorkerSettings, database: Connection, settled: CalculationRequest
) -> None:
    await make_old(database)

    answer = await command(worker_settings, "reconcile")

    assert isinstance(answer.data, Reconciliation)
    assert anomalies(answer.data) == {}
    assert answer.status == 0
    assert answer.data.counts == {
        "requests": 1,
        "requests_calculated": 1,
        "emails_pending": 0,
        "emails_sent": 1,
        "emails_failed": 0,
        "events_pending": 0,
        "events_held": 0,
        "events_parked": 0,
    }
    assert settled.uuid not in answer.text


async def test_what_is_young_is_not_overdue(database: Connection, stored_request: CalculationRequest) -> None:
    found = await reconciled(database)
    await intend(database, stored_request)
    await database.execute("DELETE FROM outbox")

    assert anomalies(found) == {}
    assert anomalies(await reconciled(database)) == {}


async def test_request_without_an_email_is_found_once_its_event_is_gone(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await make_old(database)
    while_pending = anomalies(await reconciled(database))
    await database.execute("DELETE FROM outbox")

    answer = await command(worker_settings, "reconcile")

    assert while_pending == {"event_overdue": 1}
    assert isinstance(answer.data, Reconciliation)
    assert anomalies(answer.data) == {"request_without_email": 1}
    assert answer.status == 1
    assert stored_request.uuid in answer.text
    assert json.loads(answer.rendered(as_json=True))["anomalies"][0]["uuids"] == [stored_request.uuid]


async def test_repair_announces_again_every_old_request_without_an_email_and_no_other(
    worker_settings: WorkerSettings, database: Connection, settled: CalculationRequest
) -> None:
    vanished = [await store(database) for _ in range(15)]
    await database.execute("DELETE FROM outbox")
    await make_old(database)
    await store(database)  # young
    await database.execute("DELETE FROM outbox")

    answer = await command(worker_settings, "reconcile", "--repair")

    assert isinstance(answer.data, Reconciliation)
    assert anomalies(answer.data) == {"request_without_email": 15}
    assert (answer.status, answer.data.announced_again) == (1, 15)
    rows = await database.fetch("SELECT request_id, type, sequence FROM outbox ORDER BY request_id")
    announced = [(row["request_id"], row["type"], row["sequence"]) for row in rows]
    assert announced == [(request.id, "request.created", 1) for request in vanished]
    assert settled.id not in [request_id for request_id, *_ in announced]


async def test_repair_may_be_run_again_and_beside_the_processes(
    worker_settings: WorkerSettings,
    database: Connection,
    pool: Pool,
    relay: Relay,
    postman: Postman,
    mail_server: MailServer,
) -> None:
    request = await store(database)
    await database.execute("DELETE FROM outbox")
    await make_old(database)

    first = await command(worker_settings, "reconcile", "--repair")
    while_pending = await command(worker_settings, "reconcile", "--repair")
    notified = notifications.consumer(worker_settings, pool, asyncio.Event())
    async with running(relay.run, notified.run, postman.run):
        await eventually(lambda: mail_server.accepted)
        await eventually(lambda: database.fetchval("SELECT count(*) = 0 FROM outbox"))
    again = await command(worker_settings, "reconcile", "--repair")

    repaired = [json.loads(answer.rendered(as_json=True)) for answer in (first, while_pending, again)]
    assert [answer["announced_again"] for answer in repaired] == [1, 0, 0]
    assert [mail.recipients for mail in mail_server.accepted] == [[request.customer_email]]
    assert again.status == 0


async def test_email_that_is_pending_for_too_long_is_found(
    database: Connection, stored_request: CalculationRequest
) -> None:
    await intend(database, stored_request)
    await database.execute("DELETE FROM outbox")
    await make_old(database)

    assert anomalies(await reconciled(database)) == {"email_overdue": 1}
    assert anomalies(await reconciled(database, email_seconds=7200.0)) == {}


async def test_parked_events_are_found_at_once_and_held_ones_when_they_are_old(
    database: Connection, stored_request: CalculationRequest
) -> None:
    await announce_next(database, stored_request.id)
    await hold_events(database, stored_request.id)
    await database.execute("UPDATE outbox_held SET parked_at = now() WHERE sequence = 1")
    await database.execute("UPDATE calculation_request SET sequence = 1")
    young = anomalies(await reconciled(database))
    await make_old(database)

    assert young == {"event_parked": 1}
    assert anomalies(await reconciled(database)) == {"event_parked": 1, "event_overdue": 1}


async def test_event_about_nothing_is_found(database: Connection, stored_request: CalculationRequest) -> None:
    await database.execute("DELETE FROM calculation_request WHERE id = $1", stored_request.id)

    assert anomalies(await reconciled(database)) == {"event_orphaned": 1}


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE calculation_request SET sequence = 1",
        "UPDATE calculation_request SET sequence = 4",
        "UPDATE calculation_request SET calculation_sequence = NULL",
        "UPDATE calculation_request SET calculation_sequence = 2",
        "UPDATE calculation_request SET calculation_sequence = 4",
        "UPDATE calculation_request SET calculation_id = NULL",
        "UPDATE email SET event_sequence = NULL",
        "UPDATE email SET event_sequence = 1",
        "UPDATE email SET settled_at = NULL",
    ],
)
async def test_sequence_that_does_not_add_up_is_found(
    database: Connection, settled: CalculationRequest, damage: str
) -> None:
    await database.execute(damage)

    [wrong] = [anomaly for anomaly in (await reconciled(database)).anomalies if anomaly.count]

    assert (wrong.name, wrong.count, wrong.uuids) == ("sequence_wrong", 1, [settled.uuid])


async def test_examples_are_bounded_and_the_count_is_not(database: Connection) -> None:
    requests = [await store(database) for _ in range(15)]
    await make_old(database)

    found = await reconciled(database)

    [overdue] = [anomaly for anomaly in found.anomalies if anomaly.count]
    assert overdue.count == 15
    assert overdue.uuids == [request.uuid for request in requests[:10]]


async def test_only_requests_since_a_time_are_looked_at(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await make_old(database)
    later = stored_request.created_at + timedelta(hours=1)

    answer = await command(worker_settings, "reconcile", "--since", later.isoformat())

    assert isinstance(answer.data, Reconciliation)
    assert set(answer.data.counts.values()) == {0}
    assert answer.status == 0
