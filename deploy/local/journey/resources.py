"""What the teams have: addresses and credentials, a client of the API, and what they remember."""

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.exceptions import NotFoundException

from deploy.local.journey.questionnaire import Questionnaire

_REMEMBERED = 100


class Settings(msgspec.Struct, frozen=True, rename="upper"):
    """What integrators are given, as in `.local/env`."""

    port: int
    base_url: str
    access_token: str
    api_key: str
    mail_dir: str
    app_url: str
    calculator_amqp_url: str | None = None

    @property
    def links_lead_here(self) -> bool:
        """Whether the link in the e-mail leads to the form here, and not to an APP_URL of the user."""
        return self.app_url.rstrip("/").replace("localhost", "127.0.0.1") == f"http://127.0.0.1:{self.port}"


@dataclass
class Journey:
    """What the teams remember of a request."""

    sent: dict[str, str] = field(default_factory=dict)  # calls and messages, as text
    events: dict[str, dict[str, Any]] = field(default_factory=dict)  # in the firm's feed, by their ids
    answers: dict[str, str] = field(default_factory=dict)
    times: dict[int, str] = field(default_factory=dict)  # when the steps ended


class Journeys(dict[str, Journey]):
    """The newest journeys, by the uuids of their requests."""

    after: str | None = None  # how far the firm has read its feed

    def __missing__(self, uuid: str) -> Journey:
        if len(self) >= _REMEMBERED:
            del self[next(iter(self))]
        return self.setdefault(uuid, Journey())


@dataclass(frozen=True)
class Resources:
    """What the handlers use. The application's lifespan opens it."""

    settings: Settings
    http: httpx.AsyncClient
    questionnaire: Questionnaire
    journeys: Journeys


class TeamRequest(Request[None, None, State]):
    """An HTTP request to one of the teams."""

    @property
    def resources(self) -> Resources:
        """What the teams have."""
        resources: Resources = self.app.state.resources
        return resources

    @property
    def uuid(self) -> str:
        """The uuid in the path. Raises NotFoundException if it cannot be one."""
        uuid: str = self.path_params["uuid"]
        if not re.fullmatch(r"req_[0-9A-Za-z]{1,40}", uuid):
            raise NotFoundException("There is no such page.")
        return uuid


def bearer(token: str) -> dict[str, str]:
    """Return the header with which a token of any kind is sent."""
    return {"Authorization": f"Bearer {token}"}


def transcript(response: httpx.Response, token: str) -> str:
    """Return a call to the API as text, without secrets. *token* is the name of the token."""
    request = response.request
    lines = [f"{request.method} {request.url.raw_path.decode()}", f"Authorization: Bearer {token}"]
    for name in ("Content-Type", "Idempotency-Key", "If-None-Match"):
        lines += [f"{name}: {request.headers[name]}"] if name in request.headers else []
    lines += ["", as_text(json.loads(request.content))] if request.content else []
    lines += ["", f"{response.status_code} {response.reason_phrase}"]
    lines += [as_text(response.json())] if response.content else []
    return re.sub(r'("secret": "|secret=)[\w-]+', r"\1…", "\n".join(lines))


def now() -> str:
    """Return the time, as the API writes times."""
    return datetime.now(UTC).isoformat()


def as_text(value: object) -> str:
    """Return a JSON value as people read it."""
    return json.dumps(value, indent=2, ensure_ascii=False)
