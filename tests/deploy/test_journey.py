"""The pages of `make run`: which questions the form asks, which calls are refused, and what is not shown."""

import itertools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from deploy.local.journey import customer
from deploy.local.journey.app import create_app
from deploy.local.journey.questionnaire import Questionnaire
from deploy.local.journey.resources import Settings
from deploy.local.machine.folders import CHECKOUT
from service.api.controllers import questionnaire
from tests.deploy.pages import API, section

QUESTIONS: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(questionnaire.load()))[
    "questionnaire"
]
# The answers to each question that a condition names.
CHOICES: dict[str, list[str | None]] = {
    question["ref"]: [None, *(option["value"] for option in question["responseOptions"])]
    for question in QUESTIONS
    if any(question["ref"] in other["conditions"] for other in QUESTIONS if other.get("conditions"))
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
SETTINGS = Settings(
    port=8010,
    base_url="http://127.0.0.1:1",
    access_token="a-token",
    api_key="a-key",
    mail_dir="none",
    app_url="http://127.0.0.1:8010",
)


@asynccontextmanager
async def visiting() -> AsyncIterator[httpx.AsyncClient]:
    """Yield a browser of the pages. There is no API."""
    app: Any = create_app(SETTINGS)
    url, transport = f"http://127.0.0.1:{SETTINGS.port}", httpx.ASGITransport(app)
    async with app.lifespan(), httpx.AsyncClient(base_url=url, transport=transport) as client:
        yield client


async def test_questions_are_shown_by_their_conditions_whatever_was_answered_before():
    answer = httpx.Response(200, headers={"ETag": "any"}, json={"data": {"questionnaire": QUESTIONS}})
    api = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(lambda _: answer))
    form = Questionnaire()
    await form.fetch(api, {})

    for combination in itertools.product(*CHOICES.values()):
        given = dict(zip(CHOICES, combination, strict=True))
        answers = {ref: answer for ref, answer in given.items() if answer}
        expected = [
            question["ref"]
            for question in QUESTIONS
            if SHOWN_IF.get(question["ref"], {}).items() <= answers.items()
        ]
        assert [question["ref"] for question in form.shown(answers)] == expected


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        ("GET", {"Host": "127.0.0.1:8010"}, 200),
        ("GET", {"Host": "localhost:8010"}, 200),
        ("GET", {"Host": "elsewhere.example:8010"}, 403),
        ("GET", {"Host": "127.0.0.1:8011"}, 403),
        ("GET", {"Host": "127.0.0.1"}, 403),
        ("POST", {"Host": "127.0.0.1:8010"}, 403),
        ("POST", {"Host": "127.0.0.1:8010", "Origin": "null"}, 403),
        ("POST", {"Host": "127.0.0.1:8010", "Origin": "http://elsewhere.example"}, 403),
        ("POST", {"Host": "elsewhere.example:8010", "Origin": "http://elsewhere.example:8010"}, 403),
        ("POST", {"Host": "127.0.0.1:8010", "Origin": "http://127.0.0.1:8010"}, 503),  # There is no API.
    ],
)
async def test_only_own_pages_may_call(method, headers, status):
    async with visiting() as visitor:
        answer = await visitor.request(method, "/", headers=headers)

    assert answer.status_code == status
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'self'; ")
    assert answer.headers["Cache-Control"] == "no-store"


async def test_token_is_given_to_no_caller_and_no_path_forges_a_line_of_the_log(capsys):
    async with visiting() as visitor:
        asked = await visitor.post("/access-token")
        form = await visitor.get("/")
        forged = await visitor.get("/nowhere%0AGET%20/forged%20200")

    assert (asked.status_code, forged.status_code) == (404, 404)
    assert SETTINGS.access_token not in form.text
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == ["404", "200", "404"]


def test_steps_on_the_page_for_integrators_name_functions_here():
    steps = re.findall(r"^\d\. .*?\(`(\w+)`", section(API, "First page behind the link"), re.MULTILINE)

    assert len(steps) == 5
    assert [each for each in steps if not hasattr(customer, each) and not hasattr(Questionnaire, each)] == []


def test_product_and_deployment_do_not_name_the_journey():
    folders = [CHECKOUT / name for name in ("service", "worker", "deploy/k8s")]
    files = [file for folder in folders for file in folder.rglob("*.*") if file.suffix != ".md"]
    files += [*(CHECKOUT / "deploy").glob("*.yaml"), CHECKOUT / "deploy" / "Dockerfile"]

    assert [file for file in files if b"journey" in file.read_bytes()] == []
