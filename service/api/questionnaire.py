"""The questionnaire: the questions of the calculation, read from a file, and their endpoint."""

import hashlib
import re
from http import HTTPStatus
from importlib import resources
from typing import Annotated, Literal

import msgspec
from litestar import HttpMethod, asgi

from service.api import admission
from service.api.envelope import Answer
from service.api.errors import method_not_allowed
from service.server.asgi import Receive, Scope, Send, header_values

_METHODS = "GET, OPTIONS"
_OPAQUE_TAG = re.compile(r'"[^"]*"')  # of an ETag (RFC 9110, section 8.8.3)

ResponseType = Literal["text", "number", "select", "date", "radio_button", "currency"]


class ResponseOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer to choose: *name* is shown, *value* is submitted."""

    name: str
    value: str


OptionSet = Annotated[tuple[ResponseOption, ...], msgspec.Meta(min_length=1)]


class Question(msgspec.Struct, frozen=True, rename="camel"):
    """A question, shown only if each question in *conditions* was answered with the value given there."""

    ref: str
    question: str
    info: str
    response_type: ResponseType
    response_options: OptionSet | None
    conditions: dict[str, str] | None


class QuestionnaireStructure(msgspec.Struct, frozen=True):
    """The payload of the questionnaire endpoint: the questions in the order in which they are asked."""

    questionnaire: tuple[Question, ...]


def load() -> QuestionnaireStructure:
    """Read the questionnaire in the file beside this module, where questions share sets of options."""
    file = resources.files("service.api").joinpath("questionnaire.toml")
    written = msgspec.toml.decode(file.read_bytes())
    questions = [
        {
            "conditions": None,
            **question,
            "info": question["info"].strip(),  # The closing quotes are on a line of their own.
            "responseOptions": written["options"][question["responseOptions"]]
            if "responseOptions" in question
            else None,
        }
        for question in written["questions"]
    ]
    return msgspec.convert({"questionnaire": questions}, QuestionnaireStructure)


def entity_tag(encoded: bytes) -> str:
    """Return a weak ETag of the questions: the timestamp in the envelope differs each time."""
    return f'W/"{hashlib.sha256(encoded).hexdigest()[:32]}"'


_QUESTIONS = msgspec.Raw(msgspec.json.encode(load()))  # encoded once
_ETAG = entity_tag(bytes(_QUESTIONS))


# Not `get`: Litestar's request, hooks and answer took a tenth of the time of a questionnaire.
@asgi("/v1/questionnaire/structure", copy_scope=False)
async def questionnaire_structure(scope: Scope, receive: Receive, send: Send) -> None:
    """Return the questions from which a form is built, or 304 when the caller has them."""
    answer = await _questionnaire(scope)
    await answer(scope, receive, send)


async def _questionnaire(scope: Scope) -> Answer:
    if scope["method"] == HttpMethod.OPTIONS:
        return Answer(HTTPStatus.NO_CONTENT, [(b"allow", _METHODS.encode())], b"")
    if scope["method"] != HttpMethod.GET:
        raise method_not_allowed(_METHODS)
    await admission.admit_api_key_or_token(scope)
    # Callers keep the questions, and ask each time whether they are current. No `Vary`: the questions are the
    # same for every caller, and no shared cache may keep them.
    headers = [(b"etag", _ETAG.encode()), (b"cache-control", b"private, no-cache")]
    if _is_current(header_values(scope, b"if-none-match")):
        return Answer(HTTPStatus.NOT_MODIFIED, headers, b"")
    return Answer.ok(_QUESTIONS, *headers)


def _is_current(if_none_match: list[str]) -> bool:
    """Compare weakly, as If-None-Match does (RFC 9110, sections 8.8.3.2 and 13.1.2)."""
    tag = _ETAG.removeprefix("W/")
    return any(field.strip() == "*" or tag in _OPAQUE_TAG.findall(field) for field in if_none_match)
