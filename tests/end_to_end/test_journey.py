"""The pages of `make run` over HTTP, without a browser: one request through the whole chain."""

import asyncio
import html
import itertools
import json
import re
from typing import Any

import httpx
import msgspec
import pytest

from deploy.local.journey import customer
from deploy.local.journey.app import create_app
from deploy.local.journey.questionnaire import Questionnaire
from deploy.local.journey.resources import Settings
from service.api.controllers import questionnaire
from tests.deploy.pages import API, section
from tests.end_to_end.parties import EVENTS, link_in
from tests.harness.queues import holds, write
from tests.harness.waiting import eventually
from worker.rabbitmq import topology

IS_SENT = "SELECT EXISTS (SELECT FROM email WHERE state = 'sent')"
ANSWERS = {"is_leasehold": "YES", "lease_type": "PREMIUM", "is_dwelling": "YES"}


class Visitor(httpx.AsyncClient):
    """A browser, as far as the pages need one. It keeps every page."""

    pages: list[str]

    async def read(self, path: str) -> str:
        """Return the text of a page. The keys of messages look like the rest."""
        response = await self.get(path)
        assert response.status_code == 200, (path, response.text)
        self.pages.append(response.text)
        return html.unescape(re.sub("</?b>", "", response.text))

    async def submit(self, path: str, answers: dict[str, str]) -> str:
        """Send a form, and return the path that it leads to."""
        response = await self.post(path, data=answers)
        assert response.status_code == 303, (path, response.text)
        return response.headers["Location"].partition("#")[0]

    async def answer(self, path: str, *, until: str) -> str:
        """Answer questions, one of them wrongly, until a page shows a text; return its path."""
        given = ANSWERS | {"buyer_type": "no such option"}
        while until not in (page := await self.read(path)):
            names = set(re.findall(r'name="(\w+)"', page))
            path = await self.submit(path, {name: given[name] for name in names & given.keys()})
        return path


@pytest.fixture
async def visitor(journey):
    origin = {"Origin": journey.pages.base_url}
    async with Visitor(base_url=journey.pages.base_url, headers=origin, timeout=30) as client:
        client.pages = []
        yield client


async def shows(visitor: Visitor, path: str, text: str) -> bool:
    return text in await visitor.read(path)


def red_arrows(page: str) -> list[tuple[str, str]]:
    """Return the messages that the red arrows of the picture lead to, and the arrows' labels."""
    return re.findall(r'class="gone bad">\s*<path .+\s*<a href="#(\w+)"><text .+?>([\w ]+)<', page)


async def correct_the_address(visitor: Visitor, path: str, uuid: str, channel) -> None:
    """See that the e-mail has failed, and send it to another address. Malformed events change nothing."""
    await eventually(lambda: shows(visitor, path, "Step 2 of 5: the e-mail has failed."))
    failed = await visitor.read(path)
    assert "The mail server has refused perm-fail@example.test." in failed
    assert '"type": "request.email_failed"' in failed
    assert red_arrows(failed) == [("feed", "failed")]
    for malformed in (json.dumps({"subject": uuid, "traceparent": "none"}), "[]"):
        await write(channel, topology.REQUESTS, "request.created", malformed.encode())
    await eventually(lambda: holds(channel, topology.NOTIFICATIONS.dead_letters, 2))
    await visitor.submit(f"{path}/email", {"customer_email": "ada@example.com"})
    await eventually(lambda: shows(visitor, path, "Step 2 of 5: click the link"))
    corrected = await visitor.read(path)
    assert "/email\n" in corrected
    assert red_arrows(corrected) == []


async def test_one_request_is_clicked_through_the_whole_chain_after_a_failed_email_and_leaks_nothing(
    journey, visitor, channel, database
):
    calculations = await channel.declare_queue(exclusive=True)
    await calculations.bind(topology.CALCULATIONS, "#")
    form = dict(re.findall(r'name="(\w+)" value="([^"]*)"', await visitor.read("/")))
    refused = await visitor.post("/", data=form | {"customer_email": "ada"})
    assert "customer_email: Expected an address" in refused.text
    form["customer_email"] = "perm-fail@example.test"
    path, repeated = await asyncio.gather(visitor.submit("/", form), visitor.submit("/", form))
    assert repeated == path
    uuid = path.removeprefix("/requests/")

    await correct_the_address(visitor, path, uuid, channel)
    email = await visitor.get(f"/inbox/{uuid}")
    link = link_in(email.text)
    stale = await visitor.get(link[:-3], follow_redirects=True)
    assert (stale.status_code, "This link is not valid, or no longer valid." in stale.text) == (401, True)
    opened = await visitor.get(link)
    assert len([*journey.mails.iterdir()]) == 1
    assert "sandbox allow-popups allow-popups-to-escape-sandbox" in email.headers["Content-Security-Policy"]
    questions = f"/calculator/request/{uuid}"
    assert (opened.status_code, opened.headers["Location"]) == (303, f"{questions}/1")
    assert opened.headers["Referrer-Policy"] == "no-referrer"
    cookie = {*opened.headers["Set-Cookie"].split("; ")}
    assert {"HttpOnly", "SameSite=lax", f"Path={questions}"} <= cookie

    last = await visitor.answer(f"{questions}/1", until="Send the answers")
    assert "Step 3 of 5: send the answers" in await visitor.read(path)
    assert last == await visitor.answer(last, until="Thank you")
    assert (await visitor.get(f"{questions}/99")).headers["Location"] == f"{questions}/1"
    calculator = await visitor.read(path)
    assert f"\n{json.dumps(ANSWERS, indent=2)}\n" in calculator
    assert re.search("If-None-Match: .+\n\n304 Not Modified", calculator)
    await visitor.submit(f"{path}/calculation", {"is_broken": ""})
    broken = await visitor.read(path)
    assert "But the worker cannot use it" in broken
    assert red_arrows(broken) == [("broken", "dead letter")]
    await eventually(lambda: holds(channel, topology.CALCULATION_RESULTS.dead_letters, 1))
    await eventually(lambda: database.fetchval(IS_SENT))  # recorded after the e-mail came
    for _ in range(2):  # a double click
        await visitor.submit(f"{path}/calculation", {})
    await eventually(lambda: shows(visitor, path, "Done: the firm has its calculation."))
    done = await visitor.read(path)
    assert re.findall(r"</time> ([\w.]+)", done) == EVENTS
    assert red_arrows(done) == []

    trace = await database.fetchval("SELECT split_part(traceparent, '-', 2) FROM email WHERE number = 1")
    sent = [await calculations.get(no_ack=True) for _ in range(3)]
    events = [json.loads(message.body) for message in sent]
    assert [(each.message_id, each.user_id) for each in sent] == [(each["id"], "guest") for each in events]
    assert {event["traceparent"].split("-")[1] for event in events} == {trace}
    ids = [event["data"]["calculation_id"] for event in events]
    assert ids == [42, f"calc_{uuid}", f"calc_{uuid}"]
    for hidden in (
        link.partition("?secret=")[2],
        journey.environment["ACCESS_TOKEN"],
        journey.environment["API_KEY"],
    ):
        assert hidden not in journey.logs
        assert not any(hidden in page for page in visitor.pages)
    assert f"GET '{questions}' 303" in journey.logs


QUESTIONS: list[dict[str, Any]] = msgspec.to_builtins(questionnaire.load())["questionnaire"]
# The answers to each question that a condition names.
CHOICES: dict[str, list[str | None]] = {
    question["ref"]: [None, *(option["value"] for option in question["responseOptions"])]
    for question in QUESTIONS
    if any(question["ref"] in (other.get("conditions") or ()) for other in QUESTIONS)
}
# As the interface says, written out to their ends.
SHOWN_IF: dict[str, dict[str, str]] = {
    "lease_nature": {"is_leasehold": "YES"},
    "lease_type": {"is_leasehold": "YES"},
    "lease_premium": {"is_leasehold": "YES", "lease_type": "PREMIUM"},
    "lease_term": {"is_leasehold": "YES", "lease_type": "RENT"},
    "lease_rent_year_1": {"is_leasehold": "YES", "lease_type": "RENT"},
    "property_value": {"is_leasehold": "NO"},
    "is_refinance": {"is_leasehold": "NO"},
    "selling_main_residence": {"owns_other": "YES"},
    "all_purchasers_on_title": {"owns_other": "YES", "selling_main_residence": "YES"},
    "being_converted": {"is_dwelling": "NO"},
    "is_development": {"is_dwelling": "NO", "being_converted": "NO"},
}
OURS, ELSEWHERE = "127.0.0.1:8010", "elsewhere.example:8010"
CALLS = [
    ("GET", {"Host": OURS}, 200),
    ("GET", {"Host": "localhost:8010"}, 200),
    *(("GET", {"Host": host}, 403) for host in (ELSEWHERE, "127.0.0.1:8011", "127.0.0.1")),
    ("POST", {"Host": OURS}, 403),
    *(("POST", {"Host": OURS, "Origin": each}, 403) for each in ("null", "http://elsewhere.example")),
    ("POST", {"Host": ELSEWHERE, "Origin": f"http://{ELSEWHERE}"}, 403),
    ("POST", {"Host": OURS, "Origin": f"http://{OURS}"}, 503),  # There is no API.
]


async def test_questions_are_shown_by_their_conditions_whatever_was_answered_before():
    answer = httpx.Response(200, headers={"ETag": "any"}, json={"data": {"questionnaire": QUESTIONS}})
    api = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(lambda _: answer))
    form, refs = Questionnaire(), [question["ref"] for question in QUESTIONS]
    await form.fetch(api, {})

    for combination in itertools.product(*CHOICES.values()):
        answers = {ref: given for ref, given in zip(CHOICES, combination, strict=True) if given}
        shown = [ref for ref in refs if SHOWN_IF.get(ref, {}).items() <= answers.items()]
        assert [question["ref"] for question in form.shown(answers)] == shown


async def test_only_own_pages_may_call_and_no_caller_gets_the_token_or_forges_a_line_of_the_log(capsys):
    settings = Settings(
        *(8010, "http://127.0.0.1:1", "a-token", "a-key"), mail_dir="none", app_url=f"http://{OURS}"
    )
    app: Any = create_app(settings)
    transport = httpx.ASGITransport(app)
    async with app.lifespan(), httpx.AsyncClient(base_url=f"http://{OURS}", transport=transport) as visitor:
        for method, headers, status in CALLS:
            answer = await visitor.request(method, "/", headers=headers)
            assert answer.status_code == status, (method, headers)
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; style-src 'self'; ")
            assert answer.headers["Cache-Control"] == "no-store"
        capsys.readouterr()
        asked = await visitor.post("/access-token")
        form = await visitor.get("/")
        forged = await visitor.get("/nowhere%0AGET%20/forged%20200")

    assert (asked.status_code, forged.status_code) == (404, 404)
    assert settings.access_token not in form.text
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["404", "200", "404"]


def test_steps_on_the_page_for_integrators_name_functions_here():
    steps = re.findall(r"^\d\. .*?\(`(\w+)`", section(API, "First page behind the link"), re.MULTILINE)

    assert len(steps) == 5
    assert [each for each in steps if not hasattr(customer, each) and not hasattr(Questionnaire, each)] == []
