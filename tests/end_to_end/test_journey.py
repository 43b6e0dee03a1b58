"""The journey of `make run` over HTTP, without a browser: one request through the whole chain."""

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from aio_pika.abc import AbstractChannel, AbstractQueue

from deploy.local.machine.ports import accepts, free_port
from service.authentication import api_keys
from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.deploy.mail_catching import mail_catcher
from tests.harness.examples import CONVEYANCER
from tests.harness.issuer import Issuer
from tests.harness.processes import (
    Process,
    api_process,
    bare_environment,
    python,
    started,
    worker_process,
)
from tests.harness.queues import holds
from tests.harness.waiting import eventually
from worker.rabbitmq import topology
from worker.settings import WorkerSettings

NOT_A_HOME = {"is_leasehold": "YES", "lease_type": "RENT", "is_dwelling": "NO", "being_converted": "NO"}
A_HOME = {**NOT_A_HOME, "lease_type": "PREMIUM", "is_dwelling": "YES", "buyer_type": "no such option"}


@dataclass(frozen=True)
class JourneyStack:
    """The pages, and what they need."""

    pages: Process
    others: Sequence[Process]
    mails: Path
    environment: Mapping[str, str]  # of the pages

    @property
    def logs(self) -> str:
        """What all processes have logged."""
        return "".join(process.output for process in (self.pages, *self.others))


class Visitor(httpx.AsyncClient):
    """A browser, as far as the pages need one. It keeps every page."""

    pages: list[str]

    async def read(self, path: str) -> str:
        """Return a page."""
        response = await self.get(path)
        assert response.status_code == 200, (path, response.text)
        self.pages.append(response.text)
        return html.unescape(response.text)

    async def submit(self, path: str, answers: Mapping[str, str]) -> str:
        """Send a form, and return the path that it leads to."""
        response = await self.post(path, data=answers, headers={"Origin": str(self.base_url)})
        assert response.status_code == 303, (path, response.text)
        return response.headers["Location"]

    async def answer(self, path: str, answers: Mapping[str, str], *, until: str) -> tuple[str, set[str]]:
        """Answer questions until a page shows a text; return its path and what was asked."""
        asked: set[str] = set()
        while until not in (page := await self.read(path)):
            names = set(re.findall(r'name="(\w+)"', page))
            asked |= names
            path = await self.submit(path, {name: answers[name] for name in names & answers.keys()})
        return path, asked


@pytest.fixture
async def journey(
    *,
    service_settings: ServiceSettings,
    worker_settings: WorkerSettings,
    issuer: Issuer,
    database: Connection,
    tmp_path: Path,
) -> AsyncIterator[JourneyStack]:
    """The pages of `make run`, with the API, the worker and the mail catcher that they need."""
    port = free_port()
    mails = tmp_path / "mails"
    with mail_catcher(mails) as smtp_port:
        app_url = f"http://127.0.0.1:{port}"
        smtp_url = f"smtp://127.0.0.1:{smtp_port}"
        api = api_process(service_settings, tmp_path, APP_URL=app_url)
        worker = worker_process(worker_settings, tmp_path, APP_URL=app_url, SMTP_URL=smtp_url)
        environment = bare_environment(
            PORT=str(port),
            BASE_URL=api.base_url,
            ACCESS_TOKEN=issuer.token(),
            API_KEY=await api_keys.create(database, CONVEYANCER),
            MAIL_DIR=str(mails),
            APP_URL=app_url,
            CALCULATOR_AMQP_URL=worker_settings.amqp_url,
        )
        command = python("deploy.local.journey")
        pages = Process("journey", command, environment=environment, port=port, folder=tmp_path)
        async with started(api, worker), started(pages, ready=False):
            await eventually(lambda: accepts(port))
            yield JourneyStack(pages, (api, worker), mails, environment)


@pytest.fixture
async def visitor(journey: JourneyStack) -> AsyncIterator[Visitor]:
    """A visitor of the pages."""
    async with Visitor(base_url=journey.pages.base_url, timeout=30) as client:
        client.pages = []
        yield client


@pytest.fixture
async def calculations(channel: AbstractChannel) -> AbstractQueue:
    """Every message that calculation teams send."""
    queue = await channel.declare_queue(exclusive=True)
    await queue.bind(topology.CALCULATIONS, "#")
    return queue


def inputs(page: str) -> dict[str, str]:
    """Return the names and values of a form that is filled in."""
    return dict(re.findall(r'name="(\w+)" value="([^"]*)"', page))


async def test_one_request_is_clicked_through_the_whole_chain_and_leaks_nothing(
    *, journey, visitor, channel, calculations, subscriber
):
    form = inputs(await visitor.read("/"))
    mistyped = form | {"customer_email": "ada"}
    refused = await visitor.post("/", data=mistyped, headers={"Origin": str(visitor.base_url)})
    path, repeated = await asyncio.gather(visitor.submit("/", form), visitor.submit("/", form))
    uuid = path.removeprefix("/requests/")
    await eventually(lambda: shows(visitor, path, "Step 2 of 5: click the link"))
    email = await visitor.get(f"/inbox/{uuid}")
    (link,) = map(html.unescape, re.findall('href="([^"]+)"', email.text))
    opened = await visitor.get(link)

    assert re.search('"customer_email">E-mail address <span class="error">Expected an', refused.text)
    assert (refused.status_code, inputs(refused.text)) == (422, mistyped)
    assert repeated == path
    assert len([*journey.mails.iterdir()]) == 1
    assert "sandbox allow-popups allow-popups-to-escape-sandbox" in email.headers["Content-Security-Policy"]
    questions = f"/calculator/request/{uuid}"
    assert (opened.status_code, opened.headers["Location"]) == (303, f"{questions}/1")
    assert opened.headers["Referrer-Policy"] == "no-referrer"
    cookie = opened.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=lax", f"Path={questions}"} <= {*cookie.split("; ")}

    last, asked = await visitor.answer(f"{questions}/1", NOT_A_HOME, until="Send the answers")
    assert "Step 3 of 5: send the answers" in await visitor.read(path)
    _, asked_again = await visitor.answer(f"{questions}/1", A_HOME, until="Thank you")
    assert {"lease_rent_year_1", "being_converted", "is_development"} <= asked
    assert {"lease_premium", "is_dwelling"} <= asked_again
    assert not {"lease_rent_year_1", "being_converted", "is_development"} & asked_again
    assert (await visitor.get(f"{questions}/99")).headers["Location"] == f"{questions}/1"
    calculator = await visitor.read(path)
    answers = dict(re.findall("<dt>(.+)</dt><dd>(.+)</dd>", calculator))
    assert answers == {"is_leasehold": "YES", "lease_type": "PREMIUM", "is_dwelling": "YES"}
    assert re.search("If-None-Match: .+\n\n304 Not Modified", calculator)
    assert "Thank you" in await visitor.read(last)

    await visitor.submit(f"{path}/broken", {})
    assert "makes it a dead letter" in await visitor.read(path)
    await eventually(lambda: holds(channel, topology.CALCULATION_RESULTS.dead_letters, 1))
    await eventually(lambda: "request.email_sent" in subscriber.types(uuid))  # recorded after the e-mail came
    for _ in range(2):  # a double click
        await visitor.submit(f"{path}/calculation", {})
    await eventually(lambda: shows(visitor, path, "Done: the firm has its calculation."))
    events = ["request.created", "request.email_sent", "request.calculated"]
    assert re.findall(r"<li>([\w.]+)", await visitor.read(path)) == events

    created = subscriber.about(uuid)[0]
    sent = [await calculations.get(no_ack=True) for _ in range(3)]
    for message in sent:
        event = json.loads(message.body)
        assert (message.message_id, message.user_id) == (event["id"], "guest")
        assert event["traceparent"].split("-")[1] == created["traceparent"].split("-")[1]
    ids = [json.loads(message.body)["data"]["calculation_id"] for message in sent]
    assert ids == [42, f"calc_{uuid}", f"calc_{uuid}"]

    for hidden in (
        link.partition("?secret=")[2],
        journey.environment["ACCESS_TOKEN"],
        journey.environment["API_KEY"],
    ):
        assert hidden not in journey.logs
        assert not any(hidden in page for page in visitor.pages)
    assert f"GET '{questions}' 303" in journey.logs


async def shows(visitor: Visitor, path: str, text: str) -> bool:
    """Whether a page shows a text."""
    return text in await visitor.read(path)
