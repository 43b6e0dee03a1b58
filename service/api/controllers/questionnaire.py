"""The questionnaire: the questions of the calculation, read from a file, and their endpoint."""

import hashlib
from http import HTTPStatus
from importlib import resources
from typing import Annotated, Any, Literal

import msgspec
from litestar import get
from litestar.openapi.spec import Parameter, Schema
from litestar.openapi.spec.enums import OpenAPIType

from service.api.api_request import ApiRequest
from service.api.envelope import Envelope, JSONResponse, succeed
from service.api.guards import requires_api_key_or_token
from service.api.openapi.documenting import Documented
from service.server.asgi import header_values


class ResponseOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer to choose: *name* is shown, *value* is submitted."""

    name: str
    value: str


class Question(msgspec.Struct, frozen=True, rename="camel"):
    """A question, shown only if each question in `conditions` was answered with the value given there.

    An answer to a question that is not shown counts as not given, including in the conditions of others.
    """

    ref: Annotated[str, msgspec.Meta(description="Identifies the question in answers and conditions.")]
    question: Annotated[str, msgspec.Meta(description="The text to show.")]
    info: Annotated[str, msgspec.Meta(description="The help to show; may have several lines and lists.")]
    response_type: Literal["text", "number", "select", "date", "radio_button", "currency"]
    response_options: Annotated[
        Annotated[tuple[ResponseOption, ...], msgspec.Meta(min_length=1)] | None,
        msgspec.Meta(description="Only for `select` and `radio_button`."),
    ]
    conditions: Annotated[
        dict[str, str] | None,
        msgspec.Meta(description="Answers by the `ref` of earlier questions. If null, always shown."),
    ]


class QuestionnaireStructure(msgspec.Struct, frozen=True):
    """The payload of the questionnaire endpoint: the questions in the order in which they are asked."""

    questionnaire: tuple[Question, ...]


def load() -> QuestionnaireStructure:
    """Read the questionnaire from questionnaire.toml, in which questions share sets of options."""
    file = resources.files(__package__).joinpath("questionnaire.toml")
    written = msgspec.toml.decode(file.read_bytes())
    for question in written["questions"]:
        question.setdefault("conditions", None)
        question["info"] = question["info"].strip()  # In the file, each text ends with a line break.
        options = question.get("responseOptions")
        question["responseOptions"] = written["options"][options] if options else None
    return msgspec.convert({"questionnaire": written["questions"]}, QuestionnaireStructure)


# No argument of the handler: Litestar would pass on one of several headers, which took a tenth of the time.
_IF_NONE_MATCH = Parameter(
    name="If-None-Match",
    param_in="header",
    description="The `ETag` of the questions that the caller already has.",
    schema=Schema(type=OpenAPIType.STRING),
)
_QUESTIONS: Any = msgspec.Raw(msgspec.json.encode(load()))
_TAG = f'"{hashlib.sha256(_QUESTIONS).hexdigest()[:32]}'  # up to its closing quote
_HEADERS = {
    "etag": f'W/{_TAG}"',  # Weak, because the timestamp in the envelope differs each time.
    # Callers may cache the questions, and must revalidate them each time. `Vary` is not needed, because the
    # questions are the same for every caller, and shared caches may not store them.
    "cache-control": "private, no-cache",
}


@get(
    "/v1/questionnaire/structure",
    before_request=requires_api_key_or_token,
    tags=["questionnaire"],
    security=[{"api_key": []}, {"access_token": []}],
    documented=Documented(
        answers={"ok": QuestionnaireStructure(load().questionnaire[:4])},
        parameters=[_IF_NONE_MATCH],
        headers=_HEADERS,
    ),
)
async def questionnaire_structure(
    request: ApiRequest[None],
) -> JSONResponse[Envelope[QuestionnaireStructure]]:
    """Return the questions from which a form is built, or 304 when the caller has them."""
    for known in header_values(request.scope, b"if-none-match"):
        # `W/` is not compared (RFC 9110, section 13.1.2), nor what a compressing proxy adds, such as `-gzip`.
        if known.strip() == "*" or _TAG in known:
            unchanged: Any = None
            return JSONResponse(unchanged, status_code=HTTPStatus.NOT_MODIFIED, headers=_HEADERS)
    return JSONResponse(succeed(_QUESTIONS), headers=_HEADERS)
