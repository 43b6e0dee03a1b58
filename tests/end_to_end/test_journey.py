"""The journey of `make run` over HTTP, without a browser: one request through the whole chain."""

import asyncio
import html
import json
import re
from collections.abc import AsyncIterator, Mapping

import httpx
import pytest
from aio_pika.abc import AbstractChannel, AbstractQueue

from tests.end_to_end.journeys import EVENTS, JourneyStack, link_in, secret_of
from tests.harness.queues import holds, write
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

NOT_A_HOME = {"is_leasehold": "YES", "lease_type": "RENT", "is_dwelling": "NO", "being_converted": "NO"}
A_HOME = {**NOT_A_HOME, "lease_type": "PREMIUM", "is_dwelling": "YES", "buyer_type": "no such option"}


class Visitor(httpx.AsyncClient):
    """A browser, as far as the pages need one. It keeps every page."""

    pages: list[str]

    async def read(self, path: str) -> str:
        """Return the text of a page. The keys of messages look like the rest."""
        response = await self.get(path)
        assert response.status_code == 200, (path, response.text)
        self.pages.append(response.text)
        return html.unescape(re.sub("</?b>", "", response.text))

    async def submit(self, path: str, answers: Mapping[str, str]) -> str:
        """Send a form, and return the path that it leads to."""
        response = await self.post(path, data=answers)
        assert response.status_code == 303, (path, response.text)
        return response.headers["Location"].partition("#")[0]

    async def answer(self, path: str, answers: Mapping[str, str], *, until: str) -> tuple[str, set[str]]:
        """Answer questions until a page shows a text; return its path and what was asked."""
        asked: set[str] = set()
        while until not in (page := await self.read(path)):
            names = set(re.findall(r'name="(\w+)"', page))
            asked |= names
            path = await self.submit(path, {name: answers[name] for name in names & answers.keys()})
        return path, asked


@pytest.fixture
async def visitor(journey: JourneyStack) -> AsyncIterator[Visitor]:
    """A visitor of the pages."""
    origin = {"Origin": journey.pages.base_url}
    async with Visitor(base_url=journey.pages.base_url, headers=origin, timeout=30) as client:
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


def red_arrows(page: str) -> list[tuple[str, str]]:
    """Return the messages that the red arrows of the picture lead to, and the arrows' labels."""
    return re.findall(r'class="gone bad">\s*<path .+\s*<a href="#(\w+)"><text .+?>([\w ]+)<', page)


async def test_one_request_is_clicked_through_the_whole_chain_and_leaks_nothing(
    *, journey, visitor, channel, calculations, subscriber
):
    form = inputs(await visitor.read("/"))
    refused = await visitor.post("/", data=form | {"customer_email": "ada"})
    path, repeated = await asyncio.gather(visitor.submit("/", form), visitor.submit("/", form))
    uuid = path.removeprefix("/requests/")
    await eventually(lambda: shows(visitor, path, "Step 2 of 5: click the link"))
    email = await visitor.get(f"/inbox/{uuid}")
    link = link_in(email.text)
    opened = await visitor.get(link)

    assert "customer_email: Expected an address" in refused.text
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
    answers = {"is_leasehold": "YES", "lease_type": "PREMIUM", "is_dwelling": "YES"}
    assert f"\n{json.dumps(answers, indent=2)}\n" in calculator
    assert re.search("If-None-Match: .+\n\n304 Not Modified", calculator)
    assert "Thank you" in await visitor.read(last)

    await visitor.submit(f"{path}/calculation", {"is_broken": ""})
    broken = await visitor.read(path)
    assert "But the worker cannot use it" in broken
    assert red_arrows(broken) == [("broken", "dead letter")]
    await eventually(lambda: holds(channel, topology.CALCULATION_RESULTS.dead_letters, 1))
    await eventually(lambda: "request.email_sent" in subscriber.types(uuid))  # recorded after the e-mail came
    for _ in range(2):  # a double click
        await visitor.submit(f"{path}/calculation", {})
    await eventually(lambda: shows(visitor, path, "Done: the firm has its calculation."))
    done = await visitor.read(path)
    assert re.findall(r"</time> ([\w.]+)", done) == EVENTS
    assert red_arrows(done) == []

    created = subscriber.about(uuid)[0]
    sent = [await calculations.get(no_ack=True) for _ in range(3)]
    for message in sent:
        event = json.loads(message.body)
        assert (message.message_id, message.user_id) == (event["id"], "guest")
        assert event["traceparent"].split("-")[1] == created["traceparent"].split("-")[1]
    ids = [json.loads(message.body)["data"]["calculation_id"] for message in sent]
    assert ids == [42, f"calc_{uuid}", f"calc_{uuid}"]

    for hidden in (secret_of(link), journey.environment["ACCESS_TOKEN"], journey.environment["API_KEY"]):
        assert hidden not in journey.logs
        assert not any(hidden in page for page in visitor.pages)
    assert f"GET '{questions}' 303" in journey.logs


async def test_failed_email_is_in_the_feed_and_is_sent_to_the_corrected_address(visitor):
    form = inputs(await visitor.read("/")) | {"customer_email": "perm-fail@example.test"}
    path = await visitor.submit("/", form)

    await eventually(lambda: shows(visitor, path, "Step 2 of 5: the e-mail has failed."))
    failed = await visitor.read(path)
    await visitor.submit(f"{path}/email", {"customer_email": "ada@example.com"})
    await eventually(lambda: shows(visitor, path, "Step 2 of 5: click the link"))

    assert "The mail server has refused perm-fail@example.test." in failed
    assert '"type": "request.email_failed"' in failed
    assert red_arrows(failed) == [("feed", "failed")]
    corrected = await visitor.read(path)
    assert "/email\n" in corrected
    assert red_arrows(corrected) == []


async def test_malformed_event_does_not_stop_the_pages(visitor, channel):
    path = await visitor.submit("/", inputs(await visitor.read("/")))
    for event in (json.dumps({"subject": path.removeprefix("/requests/"), "traceparent": "none"}), "[]"):
        await write(channel, topology.REQUESTS, "request.created", event.encode())
    await eventually(lambda: holds(channel, topology.NOTIFICATIONS.dead_letters, 2))

    assert await shows(visitor, path, "Step 2 of 5")
    await visitor.submit(f"{path}/calculation", {})


async def shows(visitor: Visitor, path: str, text: str) -> bool:
    """Whether a page shows a text."""
    return text in await visitor.read(path)
