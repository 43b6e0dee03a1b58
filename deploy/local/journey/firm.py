"""The law firm: sends a request, and follows what becomes of it. It has an access token."""

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import httpx
from litestar import get, post
from litestar.response import Redirect, Template

from deploy.local.journey.resources import Resources, TeamRequest, bearer, transcript

_FIELDS = {
    "customer_first_name": ("The customer’s first name", "Ada"),  # noqa: RUF001 - the apostrophe of print
    "customer_last_name": ("Last name", "Lovelace"),
    "customer_email": ("E-mail address", "ada@example.com"),
    "case_ref": ("Case reference", "12 High Street"),
}
_SENDER = {
    "sender_email": "grace@example.com",
    "sender_organization_name": "Hopper and Partners",
    "sender_first_name": "Grace",
    "sender_last_name": "Hopper",
}
_TOKEN = "$ACCESS_TOKEN"  # noqa: S105 - its name in .local/env
_TRIES = 5


@get("/")
async def show_form(request: TeamRequest) -> Template:
    """Show the form of a new request, filled in."""
    return _form(request.resources, {name: value for name, (_, value) in _FIELDS.items()}, str(uuid4()))


@post("/")
async def send(request: TeamRequest) -> Template | Redirect:
    """Create a request. The key was made with the form, so a repeat of the form repeats the create."""
    form = await request.form()
    key = str(form.get("idempotency_key", ""))
    values = {name: str(form.get(name, "")) for name in _FIELDS}
    response = await _create(request.resources, values | _SENDER, key)
    answer = response.json()
    if not response.is_success:
        page = _form(request.resources, values, key, answer["errors"])
        page.status_code = response.status_code
        return page
    uuid = answer["data"]["uuid"]
    request.resources.journeys[uuid].created = transcript(response, _TOKEN)
    return Redirect(f"/requests/{uuid}", status_code=303)


def _form(resources: Resources, values: dict[str, str], key: str, errors: Sequence[Any] = ()) -> Template:
    fields = [(name, label, values[name]) for name, (label, _) in _FIELDS.items()]
    context = {"step": 1, "fields": fields, "key": key, "errors": errors, "settings": resources.settings}
    return Template("journey.html", context=context)


async def _create(resources: Resources, body: dict[str, str], key: str) -> httpx.Response:
    """Send a create, and repeat it with the same key while the API asks for that."""
    headers = {**bearer(resources.settings.access_token), "Idempotency-Key": key}
    for tries_left in reversed(range(_TRIES)):
        response = await resources.http.post("/v1/request", json=body, headers=headers)
        if "Retry-After" not in response.headers or not tries_left:
            break
        await asyncio.sleep(min(float(response.headers["Retry-After"]), 2.0))
    return response


async def follow(resources: Resources, uuid: str) -> dict[str, Any]:
    """Return a request, its events so far, and the call that returned the events."""
    headers = bearer(resources.settings.access_token)
    found = await resources.http.get(f"/v1/request/{uuid}", headers=headers)
    events = await resources.http.get(f"/v1/request/{uuid}/events", headers=headers)
    record, listed = [response.raise_for_status().json()["data"] for response in (found, events)]
    return {"record": record, "events": listed["events"], "followed": transcript(events, _TOKEN)}
