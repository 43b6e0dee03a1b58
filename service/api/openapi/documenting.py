"""What Litestar's OpenAPI generator leaves out, with the places in Litestar's source.

- A handler has no arguments for examples of bodies and of successful answers, links, and headers of errors
  (`_openapi/responses.py`, `_openapi/request_body.py`). `documented` adds them by the `operation_class`.
- Schemas lack constraints, `extra_json_schema` and `additionalProperties`
  (`_openapi/schema_generation/schema.py`). `complete` takes those that msgspec makes.
- Examples lose their nulls (`openapi/spec/base.py`), so they are written as `msgspec.Raw`.
- An example's id is written into the document, where it is invalid (`openapi/spec/example.py`). `complete`
  removes it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import MediaType
from litestar.exceptions import ClientException
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import Example, Operation, Reference

from service.api.envelope import ErrorEnvelope, succeed
from service.api.errors import ApiError, translate
from service.api.guards import bearer_token
from service.api.idempotency_key_header import REPLAYED
from service.authentication.access_tokens import InvalidCredentials
from service.authentication.signing_keys import SigningKeysUnavailable
from service.postgres.outages import PostgresUnavailable
from service.server.asgi import Response

_OK = str(HTTPStatus.OK.value)


def _header(description: str, example: Any = None, **schema: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "description": description,
        "schema": {"type": "string", **schema},
        **({} if example is None else {"example": example}),
    }


_HEADERS = {
    "X-Request-Id": _header(
        "The caller's id, or a new one. Quote it when you report a problem.",
        "case-17",
        pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$",
    ),
    "WWW-Authenticate": _header(
        "What is wrong with the token (RFC 6750, section 3).",
        'Bearer realm="calculation-requests"',
        pattern="^Bearer ",
    ),
    REPLAYED: _header(
        "Present if this request was stored earlier, with the same `Idempotency-Key`.", const="true"
    ),
    "ETag": _header("Changes when the questions change.", pattern='^W/"'),
    "Cache-Control": _header("The caller may cache the answer, and must revalidate it each time."),
    "Retry-After": _header("Seconds to wait before the next attempt.", 1, type="integer", minimum=1),
}


def refusal(check: Callable[..., object], *arguments: object) -> ApiError:
    """Return the error that *check* raises."""
    try:
        check(*arguments)
    except ApiError as error:
        return error
    raise ValueError(check)


# The failures that every operation can have, by the names of their examples.
_ANY_FAILURE: Mapping[str, Exception] = {
    "bad_host": ClientException(),
    "two_tokens": refusal(bearer_token, ["Bearer one", "Bearer two"]),
    "no_token": refusal(bearer_token, []),
    "not_bearer": refusal(bearer_token, ["Basic YTpi"]),
    "expired_token": InvalidCredentials("The access token has expired: request a new one."),
    "unforeseen": Exception(),
    "database_unavailable": PostgresUnavailable(),
    "signing_keys_unavailable": SigningKeysUnavailable(),
}


def documented(
    answers: Mapping[str, msgspec.Struct],
    *,
    bodies: Mapping[str, Any] | None = None,
    headers: Mapping[str, bool] | None = None,
    links: Mapping[str, Any] | None = None,
    may_be_unchanged: bool = False,
    **failures: Exception,
) -> dict[str, Any]:
    """Return the arguments of a handler that document it: `responses` and `operation_class`.

    *answers* are payloads, *bodies* are bodies, and *failures* are errors, by the names of their examples.
    The example of an error is the actual response to it. *headers* are those of successful answers, and True
    means that all of them have the header. An answer that *may_be_unchanged* is 304 then.
    """
    refused: dict[HTTPStatus, dict[str, Response]] = {}
    for name, failure in {**failures, **_ANY_FAILURE}.items():
        response = translate(failure).answer()
        refused.setdefault(response.status, {})[name] = response
    sent_headers = {str(status.value): _shared_headers(sent.values()) for status, sent in refused.items()}
    successes = {name: succeed(each) for name, each in answers.items()}

    @dataclass
    class Documented(Operation):
        def __post_init__(self) -> None:
            _describe(self)
            for status, response in (self.responses or {}).items():
                response.headers = _headers(sent_headers.get(status, headers or {}))  # type: ignore[union-attr]
            ok: Any = (self.responses or {})[_OK]
            ok.description, ok.links = HTTPStatus.OK.phrase, links
            _add_examples(ok, successes)
            if self.request_body is not None:
                _add_examples(self.request_body, bodies or {})

    responses = {int(status): _response(status, sent) for status, sent in sorted(refused.items())}
    if may_be_unchanged:
        unchanged = HTTPStatus.NOT_MODIFIED
        responses[int(unchanged)] = ResponseSpec(None, description=unchanged.phrase)
    return {"responses": responses, "operation_class": Documented}


def _response(status: HTTPStatus, sent: Mapping[str, Response]) -> ResponseSpec:
    examples = [
        Example(id=name, value=_written(msgspec.json.decode(each.body))) for name, each in sent.items()
    ]
    return ResponseSpec(ErrorEnvelope, generate_examples=False, description=status.phrase, examples=examples)


def _describe(operation: Operation) -> None:
    """Take the summary from the docstring, and add the parameters that every endpoint has."""
    summary, _, description = (operation.description or "").partition(".")
    operation.summary, operation.description = summary, description.strip() or None
    everywhere = [Reference(f"#/components/parameters/{name}") for name in ("X-Request-Id", "traceparent")]
    operation.parameters = [*(operation.parameters or ()), *everywhere]


def link(name: str, *, to: str, **parameters: str) -> dict[str, Any]:
    """Return a link to another operation, whose parameters are taken from the answer."""
    return {name: {"operationId": to, "parameters": parameters}}


def _shared_headers(answers: Iterable[Response]) -> dict[str, bool]:
    """Return the headers that any of the answers has. True means that all of the answers have the header."""
    sent = [{name.decode() for name, _ in each.headers} for each in answers]
    return {
        name: all(name.lower() in names for names in sent)
        for name in _HEADERS
        if any(name.lower() in names for names in sent)
    }


def _headers(sent: Mapping[str, bool]) -> dict[str, Any]:
    is_always_sent = {"X-Request-Id": True, **sent}
    return {name: _HEADERS[name] | {"required": is_always_sent[name]} for name in sorted(is_always_sent)}


def _add_examples(body: Any, values: Mapping[str, Any]) -> None:  # noqa: ANN401 - of an answer or a request
    body.content[MediaType.JSON].examples = {
        name: Example(value=_written(value)) for name, value in values.items()
    }


def _written(value: object) -> msgspec.Raw:
    """Return an example as JSON. Litestar would drop its nulls (`openapi/spec/base.py`)."""
    written = msgspec.to_builtins(value)
    if "meta" in written:  # Constant, so that the document does not change.
        written["meta"]["timestamp"] = "2026-03-02T09:30:00.123456+00:00"
    return msgspec.Raw(msgspec.json.encode(written))


def complete(generated: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document that Litestar generated, with *schemas* in place of those of its components.

    Litestar puts the modules of type arguments into the names of schemas. msgspec does not.
    """
    text = msgspec.json.encode({**generated, "components": {**generated["components"], "schemas": schemas}})
    text = re.sub(rb'(#/components/schemas/Envelope_)[\w.]*\.(\w+_")', rb"\1\2", text)
    document: dict[str, Any] = msgspec.json.decode(text)
    for operation in operations(document):
        for response in operation["responses"].values():
            for content in response.get("content", {}).values():
                for example in content.get("examples", {}).values():
                    example.pop("id", None)
        for parameter in operation["parameters"]:
            _simplify(parameter)
    return document


def operations(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the operations of a document."""
    return [operation for item in document["paths"].values() for operation in item.values()]


def _simplify(parameter: dict[str, Any]) -> None:
    """Remove from a parameter that it may be null: it may be left out. And remove what stands there twice."""
    schema = parameter.get("schema", {})
    schema.pop("description", None)
    if examples := parameter.pop("examples", None):
        del schema["examples"]
        (parameter["example"],) = [each["value"] for each in examples.values()]
        if parameter["in"] == "query":
            parameter["x-fill-example"] = "no"  # Otherwise RapiDoc would send the example with every call.
    if "oneOf" in schema:
        (kind,) = [each for each in schema.pop("oneOf") if each != {"type": "null"}]
        parameter["schema"] = {**kind, **schema}
