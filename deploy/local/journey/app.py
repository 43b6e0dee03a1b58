"""Assembles the journey: the teams, and the page that shows their five steps."""

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from aio_pika.exceptions import AMQPError
from jinja2 import Environment, FileSystemLoader
from litestar import Litestar, Request, get
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.plugins.jinja import JinjaTemplateEngine
from litestar.response import Template
from litestar.static_files import create_static_files_router
from litestar.template import TemplateConfig

from deploy.local.journey import calculator, customer, firm, guard, inbox
from deploy.local.journey.questionnaire import Questionnaire
from deploy.local.journey.resources import Journey, Journeys, Resources, Settings, TeamRequest

_HERE = Path(__file__).parent
# The last of these events says what has become of the customer's e-mail.
_OF_EMAILS = {"request.email_sent", "request.email_failed", "request.corrected"}


def create_app(settings: Settings) -> Litestar:
    """Return the ASGI application."""
    loader = FileSystemLoader(_HERE / "templates")
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True)
    return Litestar(
        route_handlers=[
            firm.show_form,
            firm.send,
            firm.correct_address,
            show_journey,
            inbox.show_email,
            customer.open_link,
            customer.show_step,
            customer.take_answers,
            calculator.announce,
            create_static_files_router("/static", [_HERE / "static"]),
        ],
        lifespan=[_lifespan],
        template_config=TemplateConfig(instance=JinjaTemplateEngine(engine_instance=templates)),
        exception_handlers={Exception: _explain},
        before_request=guard.refuse_other_sites,
        before_send=[guard.finish],
        state=State({"settings": settings}),
        request_class=TeamRequest,
        request_max_body_size=64 * 1024,
        openapi_config=None,
        logging_config=None,
    )


@asynccontextmanager
async def _lifespan(app: Litestar) -> AsyncIterator[None]:
    """Open the client of the API, and take events while this process runs."""
    settings, journeys = app.state.settings, Journeys()
    client = httpx.AsyncClient(base_url=settings.base_url, timeout=15.0, trust_env=False)
    async with client as http, asyncio.TaskGroup() as tasks:
        app.state.resources = Resources(settings, http, Questionnaire(), journeys)
        reading = tasks.create_task(calculator.read_events(settings.calculator_amqp_url, journeys))
        yield
        reading.cancel()


@get("/requests/{uuid:str}")
async def show_journey(request: TeamRequest) -> Template:
    """Show how far a request has come, with a step for each team."""
    resources, uuid = request.resources, request.uuid
    await firm.read_feed(resources)  # first: the record then has what the feed's events announce
    record = await firm.find(resources, uuid)
    journey = resources.journeys[uuid]
    file, email = inbox.newest(resources.settings.mail_dir, uuid)
    journey.times[1] = record["created_at"]
    if email:
        journey.times[2] = email["Date"].datetime.isoformat()
        journey.sent["email"] = email.as_string().partition("\n\n")[0]
    context = {"uuid": uuid, "record": record, "email": email, "file": file, "journey": journey}
    context |= _progress(journey, resources.settings)
    return Template("journey.html", context=context | {"settings": resources.settings})


def _progress(journey: Journey, settings: Settings) -> dict[str, Any]:
    """Return the step, the station of the picture that acts, and what the visitor does."""
    sent, events = journey.sent, journey.events.values()
    is_calculated = "request.calculated" in [event["type"] for event in events]
    of_emails = [event for event in events if event["type"] in _OF_EMAILS]
    has_failed = bool(of_emails) and of_emails[-1]["data"].get("reason", "cancelled") != "cancelled"
    is_answered = "answers" in sent or ("email" in sent and not settings.links_lead_here)
    states = (
        (is_calculated, 6, "Firm", "Done: the firm has its calculation."),
        ("announced" in sent, 5, "Calculations", "wait for the calculation."),
        (has_failed, 2, "Firm", "the e-mail has failed. Correct the address."),
        (is_answered, 4, "Calculation", "announce the calculation."),
        ({"email", "opened"} <= sent.keys(), 3, "Customer", "send the answers, in the tab of the link."),
        ("email" in sent, 2, "Customer", "click the link in the e-mail."),
        ("request.created" in sent, 2, "Notifications", "wait for the e-mail."),
        (True, 2, "Relay", "wait for the e-mail."),
    )
    _, step, acting, to_do = next(state for state in states if state[0])
    return {"step": step, "acting": acting, "to_do": to_do, "has_failed": has_failed}


def _explain(_: Request[Any, Any, Any], error: Exception) -> Template:
    """Return a page that says in one sentence what is wrong."""
    status: int = HTTPStatus.SERVICE_UNAVAILABLE
    match error:
        case HTTPException():
            status, text = error.status_code, error.detail
        case httpx.HTTPStatusError():
            status, refusal = error.response.status_code, error.response.json()["errors"][0]
            text = ": ".join(filter(None, (refusal["field"], refusal["message"])))
        case httpx.TransportError() | AMQPError() | ConnectionError() | TimeoutError():
            server = "API" if isinstance(error, httpx.TransportError) else "RabbitMQ"
            text = f"{server} does not answer. `make run` starts it again if it has died: reload this page."
        case _:
            traceback.print_exception(error)
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, "This page failed: see .local/logs/journey.log."
    return Template("base.html", context={"text": text}, status_code=status)
