"""What Litestar's OpenAPI generator cannot do, with the places in Litestar's source.

- A handler has no arguments for examples of bodies and of successful answers, for links, and for headers of
  errors (`_openapi/responses.py`, `_openapi/request_body.py`), and examples lose their nulls
  (`openapi/spec/base.py`). So a handler's `opt` has a Documented (declarations.py).
- Schemas lack constraints, `extra_json_schema` and `additionalProperties`
  (`_openapi/schema_generation/schema.py`). `complete` replaces them by those that msgspec makes.
- A dependency's parameters are those of its signature (`_openapi/parameters.py`), which a struct of them
  has not. `complete` adds them. Descriptions are written twice.

The same document by `operation_class`, an `OpenAPISchemaPlugin` and a render plugin took 367 lines, and lost
second examples, links, headers, the waiver's rule, and the page's dark theme and accessibility.
"""

from collections.abc import Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Litestar, MediaType, Response
from litestar.handlers import HTTPRouteHandler
from litestar.routes import HTTPRoute

from service.api.decoding import Sent, parse
from service.api.envelope import ErrorEnvelope, fail, succeed
from service.api.errors import ApiError, translate
from service.api.openapi import schemas
from service.api.openapi.declarations import Documented, common_failures, refusal
from service.api.openapi.examples import bodies_of

_EVERYWHERE = [{"$ref": f"#/components/parameters/{name}"} for name in ("X-Request-Id", "traceparent")]
# The same access tokens as those of the scheme access_token: it shows how to request them.
CLIENT_CREDENTIALS = "client_credentials"


@lru_cache(maxsize=1)
def complete(app: Litestar) -> dict[str, Any]:
    """Return the OpenAPI document of an application."""
    document = app.openapi_schema.to_schema()
    handlers = handlers_by_operation(app)
    types: list[Any] = [ErrorEnvelope]
    for path, item in document["paths"].items():
        for operation in item.values():
            handler = handlers[operation["operationId"]]
            answer = _answer_type(handler)
            documented: Documented = handler.opt.get("documented", Documented())
            _describe(operation, handler, documented)
            failures = common_failures(operation, path, answer) | dict(documented.failures)
            types.append(answer)
            if handler.parsed_data_field:
                body = handler.parsed_data_field.annotation
                operation["requestBody"]["content"] = _content(body, bodies_of(body))
                failures["refused_fields"] = refusal(parse, body, documented.refused_body)
                types.append(body)
            operation["responses"] = _answers(answer, documented) | _refusals(failures)
            if CLIENT_CREDENTIALS in document["components"]["securitySchemes"]:
                scopes = [each["access_token"] for each in operation["security"] if "access_token" in each]
                operation["security"] += [{CLIENT_CREDENTIALS: each} for each in scopes]
    for parameter in document["components"]["parameters"].values():
        parameter.update(schemas.NO_FILL)
    document["components"]["schemas"] = schemas.generate(*types)
    return document


def handlers_by_operation(app: Litestar) -> dict[str, HTTPRouteHandler]:
    """Return the handlers by the ids of their operations."""
    routes = [route for route in app.routes if isinstance(route, HTTPRoute)]
    return {handler.handler_name: handler for route in routes for handler in route.route_handlers}


def _describe(operation: dict[str, Any], handler: HTTPRouteHandler, documented: Documented) -> None:
    """Take the summary from the docstring, and complete the parameters."""
    operation["summary"], _, description = operation.pop("description").partition(".")
    if description:
        operation["description"] = description.strip()
    parameters = [_simplified(each) for each in operation.get("parameters", ())]
    for name, field in handler.parsed_fn_signature.parameters.items():
        if field.is_subclass_of(Sent) and name != "data":
            parameters += schemas.parameters(field.annotation)
    parameters += [each.to_schema() for each in documented.parameters]
    operation["parameters"] = parameters + _EVERYWHERE


def _answer_type(handler: HTTPRouteHandler) -> Any:  # noqa: ANN401 - a type
    returned = handler.parsed_return_field
    return (returned.inner_types[0] if returned.is_subclass_of(Response) else returned).annotation


def _answers(answer: object, documented: Documented) -> dict[str, dict[str, Any]]:
    """Return the responses that are no errors: 304, too, if the caller may send what it has."""
    headers = schemas.headers(*documented.headers)
    examples = {name: succeed(payload) for name, payload in documented.answers.items()}
    ok = {
        "description": HTTPStatus.OK.phrase,
        "headers": headers,
        "content": _content(answer, examples),
    }
    answers = {"200": ok | ({"links": documented.links} if documented.links else {})}
    if any(parameter.name == "If-None-Match" for parameter in documented.parameters):
        answers["304"] = {"description": HTTPStatus.NOT_MODIFIED.phrase, "headers": headers}
    return answers


def _refusals(failures: Mapping[str, Exception]) -> dict[str, dict[str, Any]]:
    by_status: dict[HTTPStatus, dict[str, ApiError]] = {}
    for name, failure in failures.items():
        error = translate(failure)
        by_status.setdefault(error.status, {})[name] = error
    return {
        str(status.value): {
            "description": status.phrase,
            "headers": schemas.headers(*(error.headers.keys() for error in named.values())),
            "content": _content(
                ErrorEnvelope, {name: fail(status, error.errors) for name, error in named.items()}
            ),
        }
        for status, named in sorted(by_status.items())
    }


def _content(kind: object, examples: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: {"value": msgspec.to_builtins(value)} for name, value in examples.items()}
    for example in shown.values():
        if "meta" in example["value"]:  # Constant, so that the document does not change.
            example["value"]["meta"]["timestamp"] = "2026-03-02T09:30:00.123456+00:00"
    return {MediaType.JSON.value: {"schema": schemas.reference(kind), "examples": shown}}


def _simplified(parameter: dict[str, Any]) -> dict[str, Any]:
    """Remove the description and the examples that are written twice."""
    schema = parameter["schema"]
    del schema["description"]
    for example in parameter.pop("examples", {}).values():
        parameter["example"] = example["value"]
        del schema["examples"]
    return parameter
