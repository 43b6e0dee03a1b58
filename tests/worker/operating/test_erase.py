"""`request erase`: nothing personal is left in Postgres or in the dead letters, and nothing else changes."""

import asyncio
import json
from collections.abc import Collection, Sequence
from functools import partial
from hashlib import sha256
from typing import Any
from uuid import UUID

import aio_pika
import pytest
from aio_pika import Message
from aio_pika.abc import AbstractChannel
from yarl import URL

from deploy.local.machine.ports import free_port
from service.calculation_requests import event_history
from service.calculation_requests.model import CalculationRequest, RequestErased, RequestNotFound
from service.identifiers import new_request_id, uuid_of
from service.operations import operator_actions
from service.outbox.events import CalculationCreated
from service.postgres.pool import Connection, Pool
from service.settings import InvalidSetting
from tests.harness.mail_server import MailServer
from tests.harness.queues import count
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually
from tests.worker import deliveries
from tests.worker.conftest import (
    bind_tap,
    created_body,
    created_event,
    hold_events,
    settings_with,
    store,
    take_all,
)
from tests.worker.operating.steps import attempt_emails, calculate, intend
from tests.worker.operating.test_commands import command
from tests.worker.operating.test_emails import assert_sound, key_of, states
from worker.mail.postman import Postman
from worker.operating import erased_letters
from worker.operating.dead_letter_queues import QUEUES, DeadLettersInUse, Limits, held
from worker.operating.erase import DeadLettersLeft, Erasure
from worker.rabbitmq import topology
from worker.rabbitmq.connection import open_connection
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS, Queue
from worker.relay.loop import Relay
from worker.relay.publisher import Publisher
from worker.settings import WorkerSettings

MARK = "Xq7personal"
NEVER = asyncio.Event()
MARKED: dict[str, Any] = {
    "customer_email": f"{MARK}@customer.example.com",
    "customer_phone": MARK,
    "customer_first_name": MARK,
    "customer_last_name": MARK,
    "sender_email": f"{MARK}@firm.example.com",
    "sender_organization_name": MARK,
    "sender_first_name": MARK,
    "sender_last_name": MARK,
    "case_ref": MARK,
    "notes": MARK,
    "external_id": MARK,
    "meta_data": json.dumps({"of": MARK}),
    "calculation_fee_exempt": True,
    "calculation_fee_exempt_reason": MARK,
}


async def erase(settings: WorkerSettings, request: CalculationRequest, *words: str, **limits: Any) -> Erasure:
    """Return the answer of `request erase`."""
    answer = await command(settings, "request", "erase", request.uuid, *words, **limits)
    assert isinstance(answer.data, Erasure)
    return answer.data


async def dump(database: Connection) -> str:
    """Return every row of every table, as text."""
    tables = await database.fetch("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
    assert len(tables) >= 9
    rows = [
        row[0]
        for table in tables
        for row in await database.fetch(f"SELECT t::text FROM {table['tablename']} AS t")  # noqa: S608
    ]
    payloads = await database.fetch("SELECT payload FROM outbox UNION ALL SELECT payload FROM outbox_held")
    return "\n".join([*rows, *(row["payload"].decode() for row in payloads)])


async def bury(
    channel: AbstractChannel, queue: Queue, body: bytes, *, message_id: str | None = None, **headers: str
) -> None:
    """Dead-letter a message, as consumers do."""
    exchange = await channel.get_exchange(topology.DEAD_LETTERS)
    message = Message(body, message_id=message_id, headers={"x-reason": "Malformed", **headers})
    await exchange.publish(message, queue.dead_letters)


async def dead_letters(channel: AbstractChannel) -> list[bytes]:
    """Take the bodies of all dead letters."""
    queues = [await channel.get_queue(queue.dead_letters) for queue in QUEUES.values()]
    return [message.body for queue in queues for message in await take_all(queue)]


async def unpublished(database: Connection) -> Sequence[dict[str, Any]]:
    """Return the unpublished events, in order."""
    rows = await database.fetch(
        "SELECT id, payload FROM outbox UNION ALL SELECT id, payload FROM outbox_held ORDER BY id"
    )
    return [json.loads(row["payload"]) for row in rows]


async def test_nothing_personal_is_left_in_any_table_or_dead_letter(
    worker_settings: WorkerSettings,
    database: Connection,
    channel: AbstractChannel,
    postman: Postman,
    mail_server: MailServer,
) -> None:
    other = await store(database, external_id="another-case")
    request = await store(database, **MARKED)
    await database.execute(
        "UPDATE calculation_request SET idempotency_key = $2, idempotency_sha256 = $3 WHERE id = $1",
        request.id,
        f"of {MARK}",
        MARK.encode(),
    )
    await hold_events(database, request.id)
    mail_server.rcpt_reply = f"450 4.2.1 <{MARK}@customer.example.com> try later"
    await intend(database, request)
    await attempt_emails(database, postman)
    await calculate(database, request)
    mentions = json.dumps({"request_uuid": request.uuid, "buyer": MARK})
    for body in (created_body(request), created_body(other), mentions.encode(), b"{" + mentions.encode()):
        await bury(channel, NOTIFICATIONS, body)
        await bury(channel, CALCULATION_RESULTS, body)
    assert MARK in await dump(database)
    assert MARK.encode().hex() in await dump(database)
    before = await unpublished(database)

    done = await erase(worker_settings, request, "--by", "Ada", "--reason", "asked for it")

    assert done == Erasure(request.uuid, was_erased_before=False, dead_letters=6)
    left = await dump(database)
    assert MARK not in left
    assert MARK.encode().hex() not in left
    assert await dead_letters(channel) == [created_body(other)] * 2
    after = await unpublished(database)
    assert [event["data"].pop("external_id") for event in after] == ["another-case", None, None, None]
    assert [event["data"].pop("external_id") for event in before] == ["another-case", MARK, MARK]
    assert after[:-1] == before
    assert (after[-1]["type"], after[-1]["data"]["reason"]) == ("request.email_failed", "cancelled")
    assert await states(database) == {key_of(request): "failed"}
    [action] = await operator_actions.read(database, request.id)
    assert (action.action, action.operator, action.reason) == ("request erase", "Ada", "asked for it")
    await assert_sound(database)


@pytest.mark.usefixtures("channel")
async def test_types_and_times_of_its_events_are_left(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    await calculate(database, stored_request)
    [before] = await event_history.read(database, [stored_request.id])

    await erase(worker_settings, stored_request)

    after = await event_history.read_erased(database, stored_request.id)
    assert after is not None
    written = [(each.event.type, each.event.sequence, each.at) for each in after.recorded_events()]
    assert written[:2] == [
        (each.event.type, each.event.sequence, each.at) for each in before.recorded_events()
    ]
    assert [kind for kind, *_ in written[2:]] == ["request.email_failed"]


async def test_erasing_again_changes_nothing_but_removes_later_dead_letters(
    worker_settings: WorkerSettings,
    database: Connection,
    channel: AbstractChannel,
    stored_request: CalculationRequest,
) -> None:
    await erase(worker_settings, stored_request)
    before = await dump(database)
    await bury(channel, CALCULATION_RESULTS, json.dumps({"request_uuid": stored_request.uuid}).encode())

    assert await erase(worker_settings, stored_request) == Erasure(
        stored_request.uuid, was_erased_before=True, dead_letters=1
    )
    assert await dump(database) == before


@pytest.mark.usefixtures("channel")
async def test_two_operators_erase_once(
    worker_settings: WorkerSettings,
    database: Connection,
    stored_request: CalculationRequest,
) -> None:
    done = await asyncio.gather(*(erase(worker_settings, stored_request) for _ in range(2)))

    assert sorted(each.was_erased_before for each in done) == [False, True]
    assert await database.fetchval("SELECT count(*) FROM operator_action") == 1
    assert [event["type"] for event in await unpublished(database)] == [
        "request.created",
        "request.email_failed",
    ]


@pytest.mark.usefixtures("channel")
async def test_request_that_never_was_is_not_erased(
    worker_settings: WorkerSettings,
) -> None:
    with pytest.raises(RequestNotFound) as raised:
        await command(worker_settings, "request", "erase", uuid_of(new_request_id()))

    assert raised.type is RequestNotFound


async def test_request_is_erased_while_rabbitmq_is_down_and_its_dead_letters_when_repeated(
    worker_settings: WorkerSettings, channel: AbstractChannel, stored_request: CalculationRequest
) -> None:
    await bury(channel, NOTIFICATIONS, created_body(stored_request))
    settings = settings_with(worker_settings, amqp_url=f"amqp://127.0.0.1:{free_port()}/")

    with pytest.raises(DeadLettersLeft):
        await erase(settings, stored_request)

    done = await erase(worker_settings, stored_request)
    assert done == Erasure(stored_request.uuid, was_erased_before=True, dead_letters=1)


async def test_dead_letters_that_another_command_reads_are_erased_when_repeated(
    worker_settings: WorkerSettings, channel: AbstractChannel, stored_request: CalculationRequest
) -> None:
    await bury(channel, NOTIFICATIONS, created_body(stored_request))
    assert await eventually(lambda: count(channel, NOTIFICATIONS.dead_letters)) == 1
    limits = Limits(lock_seconds=0.2)

    async with await aio_pika.connect(worker_settings.amqp_url) as other, held(other, NOTIFICATIONS, limit=1):
        with pytest.raises(DeadLettersInUse):
            await erase(worker_settings, stored_request, limits=limits)

    assert await erase(worker_settings, stored_request) == Erasure(
        stored_request.uuid, was_erased_before=True, dead_letters=1
    )


async def test_dead_letters_of_the_other_queue_are_erased_though_one_is_read_by_another_command(
    worker_settings: WorkerSettings, channel: AbstractChannel, stored_request: CalculationRequest
) -> None:
    for queue in (NOTIFICATIONS, CALCULATION_RESULTS):
        await bury(channel, queue, created_body(stored_request))
        assert await eventually(partial(count, channel, queue.dead_letters)) == 1
    limits = Limits(lock_seconds=0.2)

    async with await aio_pika.connect(worker_settings.amqp_url) as other, held(other, NOTIFICATIONS, limit=1):
        with pytest.raises(DeadLettersInUse):
            await erase(worker_settings, stored_request, limits=limits)

        assert await count(channel, CALCULATION_RESULTS.dead_letters) == 0


async def test_dead_letters_that_name_it_beside_their_body_are_erased(
    worker_settings: WorkerSettings, channel: AbstractChannel, stored_request: CalculationRequest
) -> None:
    uuid = stored_request.uuid
    await bury(channel, CALCULATION_RESULTS, MARK.encode(), **{"cloudEvents:subject": uuid})
    await bury(channel, CALCULATION_RESULTS, MARK.encode(), message_id=f"{uuid}.request.created.1")
    await bury(channel, CALCULATION_RESULTS, b"another", message_id=uuid_of(new_request_id()))

    done = await erase(worker_settings, stored_request)

    assert done.dead_letters == 2
    assert await dead_letters(channel) == [b"another"]


async def test_other_dead_letters_stay_in_order(
    worker_settings: WorkerSettings, channel: AbstractChannel, stored_request: CalculationRequest
) -> None:
    for number in range(20):
        await bury(channel, NOTIFICATIONS, b"%d" % number)
        if number % 3 == 0:
            await bury(channel, NOTIFICATIONS, created_body(stored_request))

    done = await erase(worker_settings, stored_request)

    assert done.dead_letters == 7
    assert await dead_letters(channel) == [b"%d" % number for number in range(20)]


async def test_removal_that_rabbitmq_has_not_read_is_not_reported(
    channel: AbstractChannel,
    broker_link: TcpProxy,
    stored_request: CalculationRequest,
) -> None:
    await bury(channel, NOTIFICATIONS, created_body(stored_request))
    assert await eventually(lambda: count(channel, NOTIFICATIONS.dead_letters)) == 1
    limits = Limits(answer_seconds=1.0)

    async def lose_the_broker(_: Collection[UUID]) -> set[UUID]:
        broker_link.stall()
        return {stored_request.id}

    async with open_connection(URL(broker_link.url), seconds=5.0) as broker:
        with pytest.raises(TimeoutError):
            await erased_letters.remove(lose_the_broker, broker, limits=limits)


async def test_without_the_address_of_rabbitmq_nothing_is_erased(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    with pytest.raises(InvalidSetting, match="AMQP_URL"):
        await erase(settings_with(worker_settings, amqp_url=""), stored_request)

    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1


@pytest.mark.usefixtures("channel")
async def test_repeat_that_an_earlier_release_stored_is_erased_too(
    worker_settings: WorkerSettings, database: Connection
) -> None:
    """An earlier release does not see that the key was used for a request that was erased."""
    for _ in range(2):
        request = await store(database)
        await database.execute(
            "UPDATE calculation_request SET idempotency_key = 'the-key' WHERE id = $1", request.id
        )
        await erase(worker_settings, request)

    keys = await database.fetch("SELECT key_sha256 FROM erased_request ORDER BY id")
    assert [row["key_sha256"] for row in keys] == [sha256(b"the-key").digest(), None]


@pytest.mark.usefixtures("channel")
async def test_late_messages_about_an_erased_request_change_nothing(
    worker_settings: WorkerSettings,
    database: Connection,
    pool: Pool,
    stored_request: CalculationRequest,
) -> None:
    await erase(worker_settings, stored_request)
    before = await dump(database)

    with pytest.raises(RequestErased):
        await deliveries.record_result(CalculationCreated(stored_request.uuid, "C-1"), pool=pool)
    await deliveries.intend_email(created_event(stored_request), pool=pool)

    assert await dump(database) == before


async def test_events_of_an_erased_request_are_published_without_what_is_personal(
    worker_settings: WorkerSettings,
    database: Connection,
    channel: AbstractChannel,
    relay: Relay,
    publisher: Publisher,
) -> None:
    request = await store(database, external_id=MARK)
    tap = await bind_tap(channel, "request.*")

    await erase(worker_settings, request)
    while await relay.relay_due(publisher, NEVER):
        pass

    published = [json.loads(message.body) for message in await take_all(tap)]
    assert [(event["type"], event["data"]["external_id"]) for event in published] == [
        ("request.created", None),
        ("request.email_failed", None),
    ]
    await assert_sound(database)


@pytest.mark.usefixtures("channel")
async def test_replay_leaves_erased_requests_out(
    worker_settings: WorkerSettings, database: Connection, stored_request: CalculationRequest
) -> None:
    other = await store(database)
    await erase(worker_settings, stored_request)
    await database.execute("DELETE FROM outbox")

    await command(worker_settings, "outbox", "replay", "--from", "2020-01-01")
    with pytest.raises(RequestErased):
        await command(worker_settings, "outbox", "replay", "--uuid", stored_request.uuid)

    assert {event["data"]["uuid"] for event in await unpublished(database)} == {other.uuid}
    await assert_sound(database)
