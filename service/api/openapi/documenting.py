"""What Litestar's OpenAPI generator cannot do, with the places in Litestar's source.

- A handler has no arguments for examples of bodies and of successful answers, for links, and for headers of
  errors (`_openapi/responses.py`, `_openapi/request_body.py`), and examples lose their nulls
  (`openapi/spec/base.py`). So a handler's `opt` has a Documented.
- Schemas lack constraints, `extra_json_schema` and `additionalProperties`
  (`_openapi/schema_generation/schema.py`). `complete` replaces them by those that msgspec makes.
- A dependency's parameters are those of its signature (`_openapi/parameters.py`), so a Query has none.
  `complete` adds them. A parameter's description is written twice, and an optional one may be null.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Self

import msgspec
from litestar import Litestar, MediaType, Response
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from service.api.decoding import Body, Query
from service.api.envelope import ErrorEnvelope, succeed
from service.api.errors import translate
from service.api.openapi import common_refusals, schemas

_EVERYWHERE = [{"$ref": f"#/components/parameters/{name}"} for name in ("X-Request-Id", "traceparent")]
_ALWAYS = {"x-request-id"}
_NO_FILL = {"x-fill-example": "no"}  # Otherwise RapiDoc would send the example with every call.
# The same access tokens as those of the scheme access_token: it shows how to request them.
CLIENT_CREDENTIALS = "client_credentials"


class Documented(msgspec.Struct, frozen=True, kw_only=True):
    """What the document says of a handler, beside what follows from its signature and decorator.

    *answers* are payloads, *bodies* are bodies, and *failures* are errors, by the names of their examples.
    The example of an error is the actual response to it. Errors that several handlers have alike are in
    common_refusals.py. Successful answers always have *headers*, and may have *rare_headers*. An answer that
    *may_be_unchanged* is 304 then.
    """

    answers: Mapping[str, msgspec.Struct]
    bodies: Mapping[str, Any] = {}
    failures: Mapping[str, Exception] = {}
    headers: frozenset[str] = frozenset()
    rare_headers: frozenset[str] = frozenset()
    links: Mapping[str, Any] = {}
    may_be_unchanged: bool = False

    def __deepcopy__(self, _memo: object) -> Self:
        """Return itself. Litestar copies handlers, and exceptions cannot always be copied."""
        return self


def link(name: str, *, to: str, **parameters: str) -> dict[str, Any]:
    """Return a link to another operation, whose parameters are taken from the answer."""
    return {name: {"operationId": to, "parameters": parameters}}


@lru_cache(maxsize=1)
def complete(app: Litestar) -> dict[str, Any]:
    """Return the OpenAPI document of an application."""
    document = app.openapi_schema.to_schema()
    answers: list[Any] = [ErrorEnvelope]
    bodies: list[type[Body]] = []
    for path, method, handler in _documented(app):
        operation = document["paths"][path][method]
        _describe(operation, handler)
        operation["responses"] = _answers(handler) | _refusals(operation, path, handler)
        answers.append(_payload(handler))
        bodies += _sent(handler, Body)
        if CLIENT_CREDENTIALS in document["components"]["securitySchemes"]:
            scopes = [each["access_token"] for each in operation["security"] if "access_token" in each]
            operation["security"] += [{CLIENT_CREDENTIALS: each} for each in scopes]
    for parameter in document["components"]["parameters"].values():
        parameter.update(_NO_FILL)
    document["components"]["schemas"] = schemas.generate(answers, bodies)
    return document


def _documented(app: Litestar) -> Iterator[tuple[str, str, HTTPRouteHandler]]:
    """Yield the path, the method and the handler of each operation in the document."""
    for route in app.routes:
        if isinstance(route, HTTPRoute):
            for method, (handler, _) in route.route_handler_map.items():
                if handler.resolve_include_in_schema():
                    yield route.path_format, method.lower(), handler


def _describe(operation: dict[str, Any], handler: HTTPRouteHandler) -> None:
    """Take the summary from the docstring, and complete the parameters and the body."""
    operation["summary"], _, description = operation.pop("description").partition(".")
    if description:
        operation["description"] = description.strip()
    parameters = [_simplified(each) for each in operation.get("parameters", ())]
    for query in _sent(handler, Query):
        parameters += [_parameter(name, field) for name, field in schemas.fields(query)]
    operation["parameters"] = parameters + _EVERYWHERE
    for body in _sent(handler, Body):
        operation["requestBody"]["content"] = _content(body, handler.opt["documented"].bodies)


def _sent(handler: HTTPRouteHandler, kind: type) -> Iterator[Any]:
    """Yield the types of the handler's arguments that are subclasses of *kind*."""
    fields = handler.parsed_fn_signature.parameters.values()
    return (field.annotation for field in fields if field.is_subclass_of(kind))


def _payload(handler: HTTPRouteHandler) -> Any:  # noqa: ANN401 - a type
    """Return the type of the handler's answer: an Envelope."""
    returned = handler.parsed_return_field
    return (returned.inner_types[0] if returned.is_subclass_of(Response) else returned).annotation


def _answers(handler: HTTPRouteHandler) -> dict[str, Any]:
    """Return the responses of a handler that are no errors."""
    documented: Documented = handler.opt["documented"]
    names = _ALWAYS | {name.lower() for name in documented.headers}
    headers = schemas.headers(names, names | {name.lower() for name in documented.rare_headers})
    examples = {name: succeed(payload) for name, payload in documented.answers.items()}
    answer: dict[str, Any] = {"headers": headers, "content": _content(_payload(handler), examples)}
    if documented.links:
        answer["links"] = documented.links
    answers = _response(HTTPStatus.OK, **answer)
    if documented.may_be_unchanged:
        answers |= _response(HTTPStatus.NOT_MODIFIED, headers=headers)
    return answers


def _refusals(operation: dict[str, Any], path: str, handler: HTTPRouteHandler) -> dict[str, Any]:
    """Return the responses that are errors."""
    failures = common_refusals.of(operation, path) | dict(handler.opt["documented"].failures)
    examples: dict[HTTPStatus, dict[str, Any]] = {}
    headers: dict[HTTPStatus, list[set[str]]] = {}
    for name, failure in failures.items():
        refusal = translate(failure).answer()
        examples.setdefault(refusal.status, {})[name] = msgspec.json.decode(refusal.body)
        headers.setdefault(refusal.status, []).append(_ALWAYS | {key.decode() for key, _ in refusal.headers})
    return {
        status: response
        for each in sorted(examples)
        for status, response in _response(
            each, headers=schemas.headers(*headers[each]), content=_content(ErrorEnvelope, examples[each])
        ).items()
    }


def _response(status: HTTPStatus, **parts: Any) -> dict[str, Any]:  # noqa: ANN401 - parts of a document
    return {str(status.value): {"description": status.phrase, **parts}}


def _content(kind: object, examples: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is sent: its schema and examples."""
    shown = {name: {"value": _dated(msgspec.to_builtins(value))} for name, value in examples.items()}
    return {MediaType.JSON.value: {"schema": schemas.reference(kind), "examples": shown}}


def _dated(example: dict[str, Any]) -> dict[str, Any]:
    """Return an example with a constant timestamp, so that the document does not change."""
    return example | (
        {"meta": {"timestamp": "2026-03-02T09:30:00.123456+00:00"}} if "meta" in example else {}
    )


def _simplified(parameter: dict[str, Any]) -> dict[str, Any]:
    """Remove what stands there twice, and that the parameter may be null: it may be left out."""
    schema = parameter["schema"]
    del schema["description"]
    for example in parameter.pop("examples", {}).values():
        parameter["example"] = example["value"]
        del schema["examples"]
    (kind,) = [each for each in schema.pop("oneOf", [{}]) if each != {"type": "null"}]
    return {**parameter, "schema": {**kind, **schema}}


def _parameter(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter of a query."""
    described = {"name": name, "in": "query", "required": False, "description": schema.pop("description")}
    example = {"example": schema.pop("examples")[0], **_NO_FILL} if "examples" in schema else {}
    return {**described, **example, "schema": schema}
