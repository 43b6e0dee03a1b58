"""A calculation is recorded and announced once, and an event leads to one e-mail in the ledger."""

import asyncio
import json
import re
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import msgspec
import pytest
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from service.calculation_requests.model import RequestNotFound
from service.identifiers import new_request_id, uuid_of
from tests.harness.in_process import running
from tests.harness.stored import new_request
from tests.harness.waiting import eventually
from tests.worker.conftest import TRACEPARENT, created_body, created_event, publish
from tests.worker.consumers.conftest import dead_letter
from tests.worker.steps import all_are, calculate, intend_email
from worker.consumers import calculations, incoming, notifications
from worker.consumers.calculations import CalculationAlreadyRecorded, Result
from worker.consumers.incoming import LARGEST_BODY, Malformed
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS

CALCULATED = "SELECT * FROM event JOIN outbox USING (request_id, sequence) WHERE type = 'request.calculated'"
GOOD = {"request_uuid": "req_" + "0" * 22, "calculation_id": "calc-1"}
ATTRIBUTES = {"specversion": "1.0", "id": "1", "source": "/sdlt", "type": "calculation.created"}


def decode(body: bytes) -> Result:
    return calculations.decode(incoming.read(body), None)


def cloud_event(data: dict[str, Any] | str, **changes: Any) -> bytes:
    return msgspec.json.encode(ATTRIBUTES | changes | {"data": data})


def as_base64(data: bytes) -> bytes:
    """Return what the Python SDK 2.2 writes if it is given the data as bytes."""
    time = {"time": "2026-11-28T14:40:17.701570Z", "datacontenttype": "application/json; charset=utf-8"}
    return msgspec.json.encode({**ATTRIBUTES, **time, "data_base64": data})


def bare_data(**data: Any) -> bytes:
    return msgspec.json.encode({"request_uuid": "req_1"} | data)


async def test_message_for_no_request_and_another_calculation_are_refused(database, pool, stored_request):
    await calculate(database, stored_request.uuid, "C-1")

    with pytest.raises(CalculationAlreadyRecorded, match=r"^calculation_id: the request has another"):
        await calculate(database, stored_request.uuid, "C-2")
    with pytest.raises(RequestNotFound, match=r"^request_uuid: there is no such request$"):
        await calculate(database, uuid_of(new_request_id()), "C-1")
    with pytest.raises(RequestNotFound, match=r"^data\.uuid: there is no such request$"):
        await intend_email(created_event(new_request()), pool=pool)


@pytest.mark.parametrize(
    ("header", "body", "passed_on"),
    [
        (TRACEPARENT, None, TRACEPARENT),
        (None, TRACEPARENT, TRACEPARENT),
        (None, "00-junk", "00-[0-9a-f]{32}-[0-9a-f]{16}-00"),  # not sampled
    ],
)
async def test_event_continues_the_trace_of_the_result_or_begins_one(
    calculation_consumer, channel, database, stored_request, header, body, passed_on
):
    data = {"request_uuid": stored_request.uuid, "calculation_id": "calc-1"}
    sent = cloud_event(data, traceparent=body)

    async with running(calculation_consumer.run):
        await publish(channel, CALCULATION_RESULTS, sent, headers={"traceparent": header})
        event = await eventually(lambda: database.fetchrow(CALCULATED))

    assert re.fullmatch(passed_on, event["traceparent"])
    assert msgspec.json.decode(event["data"])["calculation_id"] == "calc-1"


_CHARACTERS = "Control, line-separator and bidirectional characters are not allowed: remove or replace "


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not readable JSON: it is empty"),
        (b'{"\xff": 1}', "not readable JSON: it is not UTF-8"),
        (b"[" * LARGEST_BODY, "not readable JSON: it nests too deeply"),
        (b" " * LARGEST_BODY + b"1", "larger than 16384 bytes"),
        (b'{"zqmark": zqmark}', "not readable JSON: invalid character (byte 11)"),
        (bare_data(calculation_id="c"), "request_uuid: Expected the uuid of a request"),
        (bare_data(calculation_id="zqmark" * 50), "calculation_id: Expected a string of length <= 255"),
        (bare_data(calculation_id="zqmark\n"), f"calculation_id: {_CHARACTERS}U+000A."),
        (bare_data(calculation_id="zqmark 1"), "calculation_id: Expected one word, without spaces"),
        (bare_data(calculation_id="\u2800"), "calculation_id: This field must not be blank."),
        (cloud_event({"request_uuid": ["zqmark"]}), "data.request_uuid: Expected a string, got an array"),
        (cloud_event({**GOOD, "request_uuid": "req_1"}), "data.request_uuid: Expected the uuid of a request"),
        (cloud_event(GOOD, type="zqmark"), "type: Expected calculation.created"),
        (cloud_event(GOOD, time="zqmark"), "time: Invalid RFC3339 encoded datetime"),
        (as_base64(b"[" * 9_000), "data_base64: Expected JSON in base64"),
        (as_base64(b"").replace(b'""', b'"zqmark!"'), "data_base64: Expected JSON in base64"),
        (cloud_event(json.dumps(GOOD)), "data: Expected an object, got a string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_result_is_refused_with_the_name_of_the_field_and_without_its_value(body, reason):
    with pytest.raises(Malformed, match=f"^{re.escape(reason)}$"):
        decode(body)


async def test_dead_letter_and_its_log_line_name_the_field_the_request_and_the_sender(
    calculation_consumer, channel, stored_request, worker_settings
):
    user = urlsplit(worker_settings.amqp_url).username  # RabbitMQ accepts no other.
    data = {"request_uuid": stored_request.uuid, "calculation_id": "calc-1"}
    body = cloud_event(data, traceparent=TRACEPARENT, type="theirs")

    with capture_logs(processors=[merge_contextvars]) as logs:
        async with running(calculation_consumer.run):
            await publish(channel, CALCULATION_RESULTS, body, message_id="theirs-1", user_id=user)
            dead = await dead_letter(channel, CALCULATION_RESULTS)
            await eventually(lambda: "message_dead_lettered" in str(logs))

    (line,) = [line for line in logs if line["event"] == "message_dead_lettered"]
    sent = {"uuid": stored_request.uuid, "message_id": "theirs-1", "user_id": user}
    trace = {"trace_id": TRACEPARENT.split("-")[1], "calculation_id": "calc-1"}
    about = {"queue": CALCULATION_RESULTS.name, "reason": "Malformed", **sent, **trace}
    assert about.items() <= line.items()
    assert dead.message_id == "theirs-1"
    assert dead.headers["x-reason-text"] == "type: Expected calculation.created"
    assert dead.headers["x-user-id"] == user


def test_message_that_names_no_request_has_no_topic():
    names_none = cloud_event({"uuid": "ada@example.com"}, traceparent="ada")
    for body in (b"", b"[]", b"\xff", b"[" * LARGEST_BODY, names_none):
        read = incoming.read(body)
        assert (read.uuid, read.calculation_id, read.traceparent) == (None, None, None)


def test_topic_is_the_request_that_the_result_is_recorded_for():
    meant, other = uuid_of(new_request_id()), uuid_of(new_request_id())
    data = {"uuid": other, "request_uuid": meant, "calculation_id": "calc-1"}
    around = {"subject": other, "request_uuid": other}
    for body in (cloud_event(data, **around), msgspec.json.encode(around | data | {"data": around})):
        assert uuid_of(decode(body).request_id) == incoming.read(body).uuid == meant


def test_unknown_fields_are_ignored_and_the_longest_message_and_calculation_id_are_accepted():
    data = GOOD | {"tax": 1250, "calculation_id": "x" * 255}
    bare, result = msgspec.json.encode(data), Result(UUID(int=0), "x" * 255)

    assert [decode(bare), decode(bare.ljust(LARGEST_BODY))] == [result] * 2
    in_event = msgspec.structs.replace(result, path="data.")
    assert [decode(cloud_event(data, dataschema="/v2")), decode(as_base64(bare))] == [in_event] * 2


@pytest.mark.parametrize(
    ("part", "other", "reason"),
    [
        (rb'"data":{[^}]+}', b'"data":{}', "data: Object missing required field"),
        (rb"request\.created", b"request.email_sent", "type: Expected request.created"),
        (rb'"req_\w+"', b'""', "data.uuid: Expected the uuid of a request"),
        (rb'"req_\w+"', b'"req_1"', "data.uuid: Expected the uuid of a request"),
    ],
)
def test_body_that_is_no_created_event_is_malformed(part, other, reason):
    body = re.sub(part, other, created_body(new_request()))

    with pytest.raises(Malformed, match=f"^{reason}"):
        notifications.decode(incoming.read(body), None)


async def test_event_leads_to_one_email_however_often_it_comes(
    worker_settings, pool, channel, postman, mail_server, database, stored_request
):
    event, due = created_event(stored_request), asyncio.Event()
    async with running(notifications.consumer(worker_settings, pool, due).run):
        await publish(channel, NOTIFICATIONS, created_body(stored_request))
        await eventually(due.is_set)
    email = await database.fetchrow("SELECT request_id, number, kind, state, attempts FROM email")
    assert email == (stored_request.id, 1, "invitation", "pending", 0)

    await database.execute("DELETE FROM email")
    async with running(postman.run):
        await asyncio.gather(*(intend_email(event, pool=pool) for _ in range(8)))
        await eventually(lambda: all_are(database, "sent"))
        await intend_email(event, pool=pool)
        assert await postman.claim_due() == 0

    assert [mail.recipients for mail in mail_server.accepted] == [[stored_request.customer_email]]
