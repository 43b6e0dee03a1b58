"""The law firm: sends a request, corrects its address, and reads its feed. It has an access token."""

import asyncio
from typing import Any
from uuid import uuid4

import httpx
from litestar import get, post
from litestar.response import Redirect, Template

from deploy.local.journey.resources import Journey, Resources, TeamRequest, bearer, transcript

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
_LONGEST_WAIT = 5.0  # seconds; the visitor reads about a longer one
_PAGES = 50  # of the feed, at most, each time


@get("/")
async def show_form(request: TeamRequest) -> Template:
    """Show the form of a new request, filled in."""
    stands = {"step": 1, "acting": "Firm", "to_do": "send a request.", "journey": Journey()}
    context = {"fields": _FIELDS, "key": uuid4(), "settings": request.resources.settings}
    return Template("journey.html", context=stands | context)


@post("/")
async def send(request: TeamRequest) -> Redirect:
    """Create a request. The key was made with the form, so a repeat of the form repeats the create."""
    form = await request.form()
    body = {name: str(form.get(name, "")) for name in _FIELDS} | _SENDER
    key = str(form.get("idempotency_key", ""))
    await read_feed(request.resources)  # Earlier events would push the new request out of what is remembered.
    created = await _post(request.resources, "/v1/request", body, **{"Idempotency-Key": key})
    uuid = created.json()["data"]["uuid"]
    request.resources.journeys[uuid].sent["created"] = transcript(created, _TOKEN)
    return Redirect(f"/requests/{uuid}#step-2", status_code=303)


@post("/requests/{uuid:str}/email")
async def correct_address(request: TeamRequest) -> Redirect:
    """Send the customer's e-mail to another address."""
    uuid, form = request.uuid, await request.form()
    body = {"customer_email": str(form.get("customer_email", ""))}
    corrected = await _post(request.resources, f"/v1/request/{uuid}/email", body)
    request.resources.journeys[uuid].sent["corrected"] = transcript(corrected, _TOKEN)
    return Redirect(f"/requests/{uuid}#step-2", status_code=303)


async def _post(resources: Resources, path: str, body: dict[str, str], **headers: str) -> httpx.Response:
    """Make a call, and repeat it if the API asks for that soon. Raises HTTPStatusError."""
    headers |= bearer(resources.settings.access_token)
    for _ in range(_TRIES):
        response = await resources.http.post(path, json=body, headers=headers)
        if (seconds := float(response.headers.get("Retry-After", "inf"))) > _LONGEST_WAIT:
            break
        await asyncio.sleep(seconds)
    return response.raise_for_status()


async def find(resources: Resources, uuid: str) -> dict[str, Any]:
    """Return a request."""
    headers = bearer(resources.settings.access_token)
    found = await resources.http.get(f"/v1/request/{uuid}", headers=headers)
    record: dict[str, Any] = found.raise_for_status().json()["data"]
    return record


async def read_feed(resources: Resources) -> None:
    """Keep the events of all requests, from where the last reading has stopped."""
    journeys, headers = resources.journeys, bearer(resources.settings.access_token)
    for _ in range(_PAGES):
        query = {"limit": "500"} | ({"after": journeys.after} if journeys.after else {})
        response = await resources.http.get("/v1/event", params=query, headers=headers)
        page, call = response.raise_for_status().json()["data"], transcript(response, _TOKEN)
        for event in page["events"]:
            journey = journeys[event["subject"]]
            journey.events[event["id"]] = event  # once, if it comes again
            journey.sent["feed"] = call
        journeys.after = page["after"]
        if not page["more"]:
            break
