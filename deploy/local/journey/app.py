"""Assembles the journey: the teams, and the page that shows their five panels."""

import asyncio
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
from aio_pika.exceptions import AMQPError
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from litestar import Litestar, Request, get
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.plugins.jinja import JinjaTemplateEngine
from litestar.response import Template
from litestar.static_files import create_static_files_router
from litestar.template import TemplateConfig

from deploy.local.journey import calculator, customer, firm, guard, inbox
from deploy.local.journey.questionnaire import Questionnaire
from deploy.local.journey.resources import Journeys, Resources, Settings, TeamRequest

_HERE = Path(__file__).parent


def create_app(settings: Settings) -> Litestar:
    """Return the ASGI application."""
    loader = FileSystemLoader(_HERE / "templates")
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return Litestar(
        route_handlers=[
            firm.show_form,
            firm.send,
            show_journey,
            inbox.show_email,
            customer.open_link,
            customer.show_step,
            customer.take_answers,
            calculator.announce,
            calculator.send_broken_message,
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
    """Show how far a request has come, with a panel for each team."""
    resources, uuid = request.resources, request.uuid
    followed = await firm.follow(resources, uuid)
    email = inbox.newest(resources.settings.mail_dir, uuid)
    journey = resources.journeys[uuid]
    waits_for_answers = journey.sent_answers is None and resources.settings.links_lead_here
    if followed["record"]["calculation_id"] or journey.announced:
        step = 6 if followed["record"]["calculation_id"] else 5
    elif email and not waits_for_answers:
        step = 4
    else:
        step = 3 if email and journey.opened else 2
    context = {"uuid": uuid, "step": step, "email": email, "journey": journey, "settings": resources.settings}
    return Template("journey.html", context=followed | context)


def _explain(_: Request[Any, Any, Any], error: Exception) -> Template:
    """Return a page that says in one sentence what is wrong."""
    status: int = HTTPStatus.SERVICE_UNAVAILABLE
    match error:
        case HTTPException():
            status, text = error.status_code, error.detail
        case httpx.HTTPStatusError():
            status, text = error.response.status_code, error.response.json()["errors"][0]["message"]
        case httpx.TransportError():
            text = "The API does not answer. `make run` starts it again if it has died: reload this page."
        case AMQPError() | ConnectionError() | TimeoutError():
            text = f"RabbitMQ did not confirm the message ({type(error).__name__}): reload this page."
        case _:
            traceback.print_exception(error)
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, "This page failed: see .local/logs/journey.log."
    return Template("base.html", context={"text": text}, status_code=status)
