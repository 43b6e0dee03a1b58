"""One request, followed from the API through outbox, broker and mail server, and back."""

import asyncio
import email
import email.policy
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aio_pika
import aio_pika.exceptions
import httpx
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from deploy.local.errors import Interrupted, LocalStackError
from deploy.local.example import a_request
from deploy.local.machine.waiting import Stopping

_STEP_SECONDS = 30.0
_POLL_SECONDS = 0.002
_STEPS = ("stored", "published", "e-mail accepted", "calculation received", "calculation_id visible")


@dataclass
class Timeline:
    """When each step happened, in seconds since the request was sent."""

    steps: dict[str, tuple[float, str]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def render(self) -> str:
        """Return one line a step, in the order in which they happened."""
        width = max(len(step) for step in _STEPS)
        happened = sorted(self.steps.items(), key=lambda step: step[1][0])
        return "\n".join(
            f"  {step:<{width}}  {seconds * 1000:8.1f} ms   {detail}" for step, (seconds, detail) in happened
        )


class StepMissing(Exception):
    """A step of the chain did not happen in time."""


@dataclass
class Chain:
    """The demo's connections to a stack, and the events it has received."""

    variables: Mapping[str, str]
    http: httpx.AsyncClient
    channel: AbstractChannel
    stopping: Stopping
    timeline: Timeline = field(default_factory=Timeline)
    sent_at: float = 0.0
    events: dict[tuple[str, str], float] = field(default_factory=dict)

    async def note_event(self, message: AbstractIncomingMessage) -> None:
        """Note when an event arrived. It may belong to another request."""
        event = json.loads(message.body)
        self.events.setdefault((event["type"], event["data"]["uuid"]), time.perf_counter())

    def happened(self, step: str, detail: str, at: float | None = None) -> None:
        """Add a step to the timeline."""
        self.timeline.steps[step] = ((at or time.perf_counter()) - self.sent_at, detail)

    async def until(self, step: str, condition: Callable[[], Awaitable[object]]) -> None:
        """Wait until *condition* is true. Raises StepMissing after 30 seconds."""
        try:
            async with asyncio.timeout(_STEP_SECONDS):
                while not await condition():
                    if self.stopping():
                        raise Interrupted
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise StepMissing(f"{step} (not within {_STEP_SECONDS:.0f} seconds)") from None


async def follow_one_request(variables: Mapping[str, str], stopping: Stopping) -> Timeline:
    """Send a request, answer it as a calculation team does, and note when each step happened."""
    async with _connected(variables, stopping) as chain:
        try:
            request, seen_mails = await _store(chain)
        except (StepMissing, httpx.HTTPError) as error:
            chain.timeline.missing.append(f"stored ({error})")
            return chain.timeline
        outcomes = await asyncio.gather(
            _be_mailed(chain, request, seen_mails), _be_calculated(chain, request), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, StepMissing):
                chain.timeline.missing.append(str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
        return chain.timeline


@asynccontextmanager
async def _connected(variables: Mapping[str, str], stopping: Stopping) -> AsyncIterator[Chain]:
    """Connect to API and broker, and consume every event about requests."""
    headers = {"Authorization": f"Bearer {variables['ACCESS_TOKEN']}"}
    client = httpx.AsyncClient(
        base_url=variables["BASE_URL"], headers=headers, timeout=_STEP_SECONDS, trust_env=False
    )
    try:
        async with asyncio.timeout(_STEP_SECONDS):
            connection = await aio_pika.connect(variables["AMQP_URL"])
    except (OSError, TimeoutError, aio_pika.exceptions.AMQPError) as error:
        raise LocalStackError(f"RabbitMQ at AMQP_URL is unreachable ({type(error).__name__}).") from None
    async with client as http, connection:
        channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
        chain = Chain(variables, http, channel, stopping)
        queue = await channel.declare_queue(exclusive=True, auto_delete=True)
        try:
            await queue.bind("calculation-requests", "request.*", timeout=_STEP_SECONDS)
        except aio_pika.exceptions.ChannelNotFoundEntity:
            raise LocalStackError(
                "The exchange calculation-requests does not exist: is the worker running?"
            ) from None
        await queue.consume(chain.note_event, no_ack=True)
        yield chain


async def _store(chain: Chain) -> tuple[dict[str, Any], set[Path]]:
    """Send the request. Return it as stored, and the e-mails that existed before."""
    mails = set(_mail_folder(chain).glob("*.eml"))
    await chain.http.get("/livez")  # Opens the connection, so that its time is not counted.
    body = a_request(f"demo-{secrets.token_hex(4)}@example.com")
    chain.sent_at = time.perf_counter()
    response = await chain.http.post("/v1/request", json=body)
    if response.status_code != httpx.codes.OK:
        raise StepMissing(f"POST /v1/request answered {response.status_code}: {response.text[:300]}")
    request: dict[str, Any] = response.json()["data"]
    chain.happened("stored", f"POST /v1/request answered 200: {request['uuid']}")
    return request, mails


async def _be_mailed(chain: Chain, request: Mapping[str, Any], seen: set[Path]) -> None:
    """Wait for the e-mail with the customer's link."""

    async def mailed() -> bool:
        new = set(_mail_folder(chain).glob("*.eml")) - seen
        seen.update(new)
        return any(request["request_url"] in text_of(file) for file in new)

    await chain.until("e-mail accepted", mailed)
    chain.happened("e-mail accepted", f"{request['customer_email']} has the request_url")


async def _be_calculated(chain: Chain, request: Mapping[str, Any]) -> None:
    """Consume the request as a calculation team, send a calculation, and wait until the API shows it."""
    uuid = request["uuid"]
    await _see_event(chain, "published", "request.created", uuid)
    calculation_id = f"calc_{secrets.token_hex(8)}"
    await _publish_calculation(chain, uuid, calculation_id)
    await _see_event(chain, "calculation received", "request.calculated", uuid)

    async def visible() -> bool:
        response = await chain.http.get(f"/v1/request/{uuid}")
        return response.is_success and response.json()["data"]["calculation_id"] == calculation_id

    await chain.until("calculation_id visible", visible)
    chain.happened("calculation_id visible", f"GET /v1/request/{uuid} shows {calculation_id}")


async def _see_event(chain: Chain, step: str, event_type: str, uuid: str) -> None:
    async def came() -> bool:
        return (event_type, uuid) in chain.events

    await chain.until(step, came)
    chain.happened(step, f"{event_type} reached a queue", at=chain.events[event_type, uuid])


async def _publish_calculation(chain: Chain, uuid: str, calculation_id: str) -> None:
    event_id = secrets.token_hex(16)
    event = {
        "specversion": "1.0",
        "id": event_id,
        "source": "/demo",
        "type": "calculation.created",
        "datacontenttype": "application/json",
        "data": {"request_uuid": uuid, "calculation_id": calculation_id},
    }
    message = aio_pika.Message(
        json.dumps(event).encode(),
        message_id=event_id,
        content_type="application/cloudevents+json",
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
    )
    try:
        exchange = await chain.channel.get_exchange("calculations")
        await exchange.publish(message, "calculation.created", mandatory=True, timeout=_STEP_SECONDS)
    except (TimeoutError, aio_pika.exceptions.AMQPError) as error:
        raise StepMissing(
            f"calculation received (it could not be published: {type(error).__name__})"
        ) from None


def _mail_folder(chain: Chain) -> Path:
    return Path(chain.variables["MAIL_DIR"])


def text_of(file: Path) -> str:
    """Return all text of an e-mail, decoded as a mail program does."""
    message = email.message_from_bytes(file.read_bytes(), policy=email.policy.default)
    return "\n".join(part.get_content() for part in message.walk() if part.get_content_maintype() == "text")
