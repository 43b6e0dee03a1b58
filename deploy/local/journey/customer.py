"""The server of the customer's form, behind the link in the e-mail. It has an API key for the questions."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from litestar import get, post
from litestar.datastructures import Cookie
from litestar.exceptions import HTTPException
from litestar.params import FromPath
from litestar.response import Redirect, Template

from deploy.local.journey.questionnaire import Question, Questionnaire
from deploy.local.journey.resources import Journey, TeamRequest, as_text, bearer, now, transcript

_COOKIE = "request_secret"
_NO_SECRET = "none"  # noqa: S105 - opens nothing
_NOT_VALID = (
    "This link is not valid, or no longer valid. Please open the link in the newest e-mail from your "
    "conveyancer, or ask your conveyancer for another."
)
_LATER = "Your questions cannot be shown at the moment. Please try again in a few minutes."


@dataclass(frozen=True)
class Form:
    """The form of a customer whose secret opens the request."""

    path: str
    customer: dict[str, Any]  # the request, as the secret shows it
    journey: Journey
    questionnaire: Questionnaire

    @property
    def steps(self) -> dict[int, list[Question]]:
        """The steps that have a question to show, by their numbers."""
        return self.questionnaire.steps(self.journey.answers)

    def keep(self, step: int, sent: Mapping[str, Any]) -> None:
        """Keep the answers of a step. An impossible answer counts as empty, and an empty one is not sent."""
        for question in self.steps.get(step, []):
            options = {option["value"] for option in question["responseOptions"] or ()}
            answer = str(sent.get(question["ref"], "")).strip()
            self.journey.answers[question["ref"]] = answer if not options or answer in options else ""


@get("/calculator/request/{uuid:str}")
async def open_link(request: TeamRequest) -> Redirect:
    """Move the secret from the address into a cookie. Nothing else changes: mail scanners open links, too."""
    path = f"/calculator/request/{request.uuid}"
    given = request.query_params.get("secret", "")
    secret = given if re.fullmatch(r"[\w-]{1,100}", given, re.ASCII) else _NO_SECRET
    cookie = Cookie(_COOKIE, value=secret, path=path, httponly=True, samesite="lax")
    return Redirect(
        f"{path}/1", status_code=303, cookies=[cookie], headers={"Referrer-Policy": "no-referrer"}
    )


@get("/calculator/request/{uuid:str}/{step:int}")
async def show_step(request: TeamRequest, step: FromPath[int]) -> Template | Redirect:
    """Show the questions of a step, or that the answers were sent."""
    form = await _open(request, step)
    if step not in form.steps:
        return Redirect(f"{form.path}/1", status_code=303)  # Other answers have hidden its questions.
    return Template("form.html", context={"form": form, "step": step})


@post("/calculator/request/{uuid:str}/{step:int}")
async def take_answers(request: TeamRequest, step: FromPath[int]) -> Redirect:
    """Keep the answers of a step. After the last step, send all answers to the calculation team."""
    form = await _open(request, step)
    journey = form.journey
    if "answers" not in journey.sent:
        form.keep(step, await request.form())
        if following := [number for number in form.steps if number > step]:
            return Redirect(f"{form.path}/{following[0]}", status_code=303)
        shown = {question["ref"] for question in form.questionnaire.shown(journey.answers)}
        answers = {ref: answer for ref, answer in journey.answers.items() if answer and ref in shown}
        journey.sent["answers"], journey.times[3] = as_text(answers), now()
    return Redirect(f"{form.path}/{step}", status_code=303)


async def _open(request: TeamRequest, step: int) -> Form:
    """Open the request with the secret, and fetch the questions. Raises HTTPException, for the customer."""
    resources, uuid = request.resources, request.uuid
    secret = request.cookies.get(_COOKIE, _NO_SECRET)
    opened = await resources.http.get(f"/v1/request/{uuid}", headers=bearer(secret))
    if not opened.is_success:
        is_refused = opened.status_code == HTTPStatus.UNAUTHORIZED
        raise HTTPException(_NOT_VALID if is_refused else _LATER, status_code=opened.status_code)
    fetched = await resources.questionnaire.fetch(resources.http, bearer(resources.settings.api_key))
    journey = resources.journeys[uuid]
    if step > 1 and "opened" not in journey.sent:
        raise HTTPException("Your earlier answers are gone. Please open the link again.", status_code=410)
    journey.sent["opened"] = f"{transcript(opened, 'the secret')}\n\n{transcript(fetched, '$API_KEY')}"
    return Form(f"/calculator/request/{uuid}", opened.json()["data"], journey, resources.questionnaire)
