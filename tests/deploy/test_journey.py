"""The pages of `make run`: which questions the form asks, which calls are refused, and what is not shown."""

import itertools
import re
from typing import Any

import httpx
import msgspec

from deploy.local.journey import customer
from deploy.local.journey.app import create_app
from deploy.local.journey.questionnaire import Questionnaire
from deploy.local.journey.resources import Settings
from service.api.controllers import questionnaire
from tests.deploy.pages import API, section

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
    form = Questionnaire()
    await form.fetch(api, {})

    for combination in itertools.product(*CHOICES.values()):
        answers = {ref: given for ref, given in zip(CHOICES, combination, strict=True) if given}
        shown = [
            each["ref"] for each in QUESTIONS if SHOWN_IF.get(each["ref"], {}).items() <= answers.items()
        ]
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
            assert answer.headers["Content-Security-Policy"].startswith(
                "default-src 'none'; style-src 'self'; "
            )
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
