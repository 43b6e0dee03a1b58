"""The consumer of calculation.created sets and announces the calculation of a request once."""

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
from tests.harness.waiting import eventually
from tests.worker.conftest import TRACEPARENT, publish
from tests.worker.consumers.conftest import dead_letter
from tests.worker.steps import calculate
from worker.consumers import calculations, incoming
from worker.consumers.calculations import CalculationAlreadyRecorded, Result
from worker.consumers.incoming import LARGEST_BODY, Malformed
from worker.rabbitmq.topology import CALCULATION_RESULTS

CALCULATED = "SELECT * FROM event JOIN outbox USING (request_id, sequence) WHERE type = 'request.calculated'"
GOOD = {"request_uuid": "req_" + "0" * 22, "calculation_id": "calc-1"}


def decode(body: bytes) -> Result:
    return calculations.decode(incoming.read(body), None)


def cloud_event(data: dict[str, Any] | str, **changes: Any) -> bytes:
    attributes = {"specversion": "1.0", "id": "1", "source": "/sdlt", "type": "calculation.created"}
    return msgspec.json.encode({**attributes, **changes, "data": data})


def as_base64(data: bytes) -> bytes:
    """Return what the Python SDK 2.2 writes if it is given the data as bytes."""
    event = {"specversion": "1.0", "id": "1", "source": "/sdlt", "type": "calculation.created"}
    event |= {"time": "2026-11-28T14:40:17.701570Z", "datacontenttype": "application/json; charset=utf-8"}
    return msgspec.json.encode({**event, "data_base64": data})


def bare_data(**data: Any) -> bytes:
    return msgspec.json.encode({"request_uuid": "req_1"} | data)


async def test_result_for_no_request_or_for_one_with_another_calculation_is_refused(database, stored_request):
    await calculate(database, stored_request.uuid, "C-1")

    with pytest.raises(CalculationAlreadyRecorded, match=r"^calculation_id: the request has another"):
        await calculate(database, stored_request.uuid, "C-2")
    with pytest.raises(RequestNotFound, match=r"^request_uuid: there is no such request$"):
        await calculate(database, uuid_of(new_request_id()), "C-1")


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

    async with running(calculation_consumer.run):
        sent = cloud_event(data, traceparent=body)
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
    with pytest.raises(Malformed) as refusal:
        decode(body)

    assert str(refusal.value) == reason


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

    assert dead.headers["x-reason-text"] == "type: Expected calculation.created"
    (line,) = [line for line in logs if line["event"] == "message_dead_lettered"]
    assert (line["queue"], line["reason"]) == (CALCULATION_RESULTS.name, "Malformed")
    assert (line["uuid"], line["calculation_id"]) == (stored_request.uuid, "calc-1")
    assert line["trace_id"] == TRACEPARENT.split("-")[1]
    assert (line["message_id"], line["user_id"]) == ("theirs-1", user)
    assert (dead.message_id, dead.headers["x-user-id"]) == ("theirs-1", user)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"\xff", b"[" * LARGEST_BODY, cloud_event({"uuid": "ada@example.com"}, traceparent="ada")],
)
def test_message_that_names_no_request_has_no_topic(body):
    read = incoming.read(body)

    assert (read.uuid, read.calculation_id, read.traceparent) == (None, None, None)


@pytest.mark.parametrize("as_event", [True, False], ids=["CloudEvent", "bare"])
def test_topic_is_the_request_that_the_result_is_recorded_for(*, as_event):
    meant, other = uuid_of(new_request_id()), uuid_of(new_request_id())
    data = {"uuid": other, "request_uuid": meant, "calculation_id": "calc-1"}
    body = (
        cloud_event(data, subject=other, request_uuid=other)
        if as_event
        else msgspec.json.encode(data | {"subject": other, "data": {"uuid": other, "request_uuid": other}})
    )

    assert uuid_of(decode(body).request_id) == meant
    assert incoming.read(body).uuid == meant


def test_unknown_fields_are_ignored_and_the_longest_message_and_calculation_id_are_accepted():
    data = GOOD | {"tax": 1250, "calculation_id": "x" * 255}

    assert decode(msgspec.json.encode(data)) == Result(UUID(int=0), "x" * 255)
    assert decode(cloud_event(data, dataschema="/v2")) == Result(UUID(int=0), "x" * 255, path="data.")
    assert decode(msgspec.json.encode(data).ljust(LARGEST_BODY)) == Result(UUID(int=0), "x" * 255)
    assert decode(as_base64(json.dumps(data).encode())) == Result(UUID(int=0), "x" * 255, path="data.")
