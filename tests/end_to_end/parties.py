"""Callers of the API, other teams on RabbitMQ, and the pages of `make run`, as the tests see them."""

import html
import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from tests.harness.examples import A_REQUEST
from tests.harness.http import NO_TLS, bearer
from tests.harness.processes import Process
from tests.harness.queues import write
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

ALL_ARE_DONE = """
    SELECT NOT EXISTS (SELECT FROM outbox)
       AND NOT EXISTS (SELECT FROM email WHERE state <> 'sent')
       AND NOT EXISTS (SELECT FROM calculation_request WHERE calculation_id IS NULL OR sequence < 3)
"""

_numbers = itertools.count(1)


def another_request() -> dict[str, Any]:
    """Return a body with a unique customer's address and external_id."""
    number = next(_numbers)
    address = f"customer-{number}@customer.example.com"
    return A_REQUEST | {"customer_email": address, "external_id": f"case-{number}"}


def client_of(api: Process, token: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=api.base_url, headers=bearer(token), timeout=20.0, verify=NO_TLS)


async def answers(client: httpx.AsyncClient, path: str, expected: int) -> bool:
    return (await client.get(path)).status_code == expected


async def become_alive_but_not_ready(*probes: httpx.AsyncClient) -> None:
    """Wait until processes live and lack something that they need."""
    for each in probes:
        assert await answers(each, "/livez", 200)
        await eventually(partial(answers, each, "/readyz", 503))


async def create(
    client: httpx.AsyncClient, body: dict[str, Any] | None = None, **headers: str
) -> dict[str, Any]:
    """Create a request, by default another one, and return its record."""
    response = await client.post("/v1/request", json=body or another_request(), headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["data"]


async def create_if_possible(client: httpx.AsyncClient) -> dict[str, Any] | None:
    """Create another request, and return its record; None while the API refuses for lack of Postgres."""
    response = await client.post("/v1/request", json=another_request())
    assert response.status_code in {200, 503}, response.text
    return response.json()["data"] if response.is_success else None


class Subscriber:
    """Another team: gets every event about requests, in the order of delivery."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    async def receive(self, message: AbstractIncomingMessage) -> None:
        self.received.append(json.loads(message.body))

    @property
    def event_ids(self) -> set[str]:
        """The ids of all events received, without repeats."""
        return {event["id"] for event in self.received}

    def about(self, uuid: str) -> list[dict[str, Any]]:
        return [event for event in self.received if event["subject"] == uuid]

    def types(self, uuid: str) -> set[str]:
        return {event["type"] for event in self.about(uuid)}


async def publish_calculation(channel: AbstractChannel, uuid: str, calculation_id: str) -> None:
    body = json.dumps({"request_uuid": uuid, "calculation_id": calculation_id}).encode()
    place = (topology.CALCULATIONS, topology.CALCULATION_RESULTS.routing_key)
    await write(channel, *place, body, mandatory=True)


async def complete(uuid: str, channel: AbstractChannel, subscriber: Subscriber) -> None:
    """Calculate a request once its e-mail is sent, and wait for the last event about it."""
    await eventually(lambda: "request.email_sent" in subscriber.types(uuid))
    await publish_calculation(channel, uuid, "calc-1")
    await eventually(lambda: "request.calculated" in subscriber.types(uuid))


# The types of the events of a request that was clicked through after a failed e-mail, in order.
EVENTS = [f"request.{name}" for name in ("created", "email_failed", "corrected", "email_sent", "calculated")]


@dataclass(frozen=True)
class JourneyStack:
    """The pages, and what they need."""

    pages: Process
    api: Process
    worker: Process
    mails: Path
    environment: Mapping[str, str]  # of the pages

    @property
    def logs(self) -> str:
        return self.pages.output + self.api.output + self.worker.output


def link_in(email: str) -> str:
    """Return the link of an e-mail's HTML, with the secret."""
    (link,) = re.findall('href="([^"]+)"', email)
    return html.unescape(link)
