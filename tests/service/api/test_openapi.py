"""The OpenAPI document."""

import re
from typing import Any
from urllib.parse import urlencode

import httpx
import jsonschema_rs
import msgspec
import pytest
from litestar import Litestar
from litestar.routes import HTTPRoute
from openapi_spec_validator import validate

from service import app
from service.api.controllers.events import FeedQuery
from service.api.decoding import parse_query
from service.api.listing import FILTERS, ListQuery
from service.api.openapi import documenting, examples
from service.outbox import asyncapi
from service.outbox.events import RequestEvent
from service.server.limits import LARGEST_BODY
from tests.harness import documented_errors, stored
from tests.harness.endpoints import ENDPOINTS
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer

_TEXT = msgspec.json.encode(app.describe())
DOCUMENT = msgspec.json.decode(_TEXT)
EXAMPLES = [
    (path, method, status, name, example["value"])
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    for status, response in operation["responses"].items()
    for name, example in response.get("content", {}).get("application/json", {}).get("examples", {}).items()
]


def answers_of(path: str, method: str, status: str = "200") -> Any:
    """Return the schema and the examples of an answer."""
    return DOCUMENT["paths"][path][method]["responses"][status]["content"]["application/json"]


def check(schema: dict[str, Any], value: Any) -> None:
    """Check *value* against a schema of the document, including formats."""
    validator(schema).validate(value)


def validator(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    whole = {**schema, "components": DOCUMENT["components"]}
    return jsonschema_rs.Draft202012Validator(whole, validate_formats=True)


@pytest.mark.parametrize("prefix", ["", "id/"])
async def test_document_is_valid_and_names_the_scopes_as_the_issuer_does(service_settings, prefix):
    async with api_client(service_settings, None, auth_scope_prefix=prefix) as caller:
        document = (await caller.get("/schema/openapi.json")).json()

    validate(document)
    of_create = {"access_token": [f"{prefix}request:write"]}
    assert document["paths"]["/v1/request"]["post"]["security"] == [of_create]
    if prefix:
        assert not re.search("[^/]request:(read|write)", msgspec.json.encode(document).decode())


def test_schemas_are_as_client_generators_need_them():
    schemas = DOCUMENT["components"]["schemas"]
    body = schemas["CreateBody"]["properties"]

    fields = [field for schema in schemas.values() for field in schema.get("properties", {}).values()]
    assert [field for field in fields if "default" in field or not field.keys() & {"type", "$ref"}] == []
    assert body["customer_phone"]["type"] == ["string", "null"]
    for name in ("CreateBody", "CalculationRequestView", "RetrievedCalculationRequest"):
        assert schemas[name]["properties"]["meta_data"]["additionalProperties"] is True
    assert b'"type":"null"' not in _TEXT
    assert "enum" not in schemas["FieldError"]["properties"]["code"], "a later release may add codes"


async def test_event_of_each_type_fits_its_own_schema_and_no_other(client, database):
    request = await stored.insert_with_each_event(database)
    response = (await client.get(f"/v1/request/{request.uuid}/events")).json()

    check(answers_of("/v1/request/{uuid}/events", "get")["schema"], response)
    schemas = DOCUMENT["components"]["schemas"]
    union = schemas[asyncapi.schema_name(RequestEvent)]
    types, (*_, another) = union["discriminator"]["mapping"], union["oneOf"]
    for event in response["data"]["events"]:
        (fitting,) = [each["$ref"] for each in union["oneOf"] if validator(each).is_valid(event)]
        assert fitting == types.pop(event["type"], another["$ref"])
        described = schemas[fitting.rpartition("/")[2]]["properties"]
        data = schemas[described["data"]["$ref"].rpartition("/")[2]]["properties"]
        assert (event.keys(), event["data"].keys()) == (described.keys(), data.keys())
    assert types == {}


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)
def test_every_endpoint_says_who_may_call_it_and_shows_what_is_sent_and_answered(endpoint):
    assert endpoint.operation.get("security")
    assert answers_of(endpoint.path, endpoint.method.lower())["examples"]
    if "requestBody" in endpoint.operation:
        assert endpoint.body.keys() == endpoint.schema["properties"].keys(), "give each field an example"
        assert "refused_fields" in answers_of(endpoint.path, endpoint.method.lower(), "422")["examples"]
        assert endpoint.schema["additionalProperties"] is False, "is decoded by Litestar itself"


def test_document_and_page_for_callers_have_every_error_code_and_no_other():
    codes = {*DOCUMENT["components"]["schemas"]["FieldError"]["properties"]["code"]["examples"]}

    shown = {error["code"] for *_, value in EXAMPLES for error in value["errors"] or ()}
    named = re.findall(r"`(\w+)`", DOCUMENT["info"]["description"])
    assert codes <= shown | set(named)
    assert codes == {code.strip("`") for _, code, *_ in documented_errors.rows()}


@pytest.mark.parametrize(("path", "method", "status", "name", "value"), EXAMPLES)
def test_example_fits_its_schema(path, method, status, name, value):
    check(answers_of(path, method, status)["schema"], value)
    assert value["status"]["code"] == int(status), name
    for error in value["errors"] or ():
        assert documented_errors.is_documented(int(status), error["code"], error["message"])


@pytest.mark.parametrize("name", [*FILTERS, "cursor", "after"])
def test_example_of_a_parameter_is_accepted(name):
    path, query = ("/v1/event", FeedQuery) if name == "after" else ("/v1/request", ListQuery)
    parameters = DOCUMENT["paths"][path]["get"]["parameters"]
    (example,) = [each["example"] for each in parameters if each.get("name") == name]

    assert getattr(parse_query(query, urlencode({name: example}).encode()), name) == example


# How to fail like the example with each name: by headers, claims of the token, or the body.
BAD_HEADERS = {
    "bad_host": {"Host": "a/b"},
    "wrong_secret": {"Authorization": f"Bearer {'A' * 43}"},
    "two_tokens": {"authorization": "Bearer another"},  # httpx sends both
    "two_keys": {"Idempotency-Key": "one", "idempotency-key": "two"},
    "malformed_key": {"Idempotency-Key": "not one token"},
    "key_reused": {"Idempotency-Key": "closing"},
    "compressed": {"Content-Encoding": "gzip"},
    "not_json": {"Content-Type": "text/plain"},
}
BAD_CLAIMS: dict[str, dict[str, Any]] = {
    "expired_token": {"exp": 1},
    "insufficient_scope": {"scope": "other"},
    "unknown_conveyancer": {"client_id": "nobody"},
}
BAD_QUERIES = {"cursor_outdated": f"after={examples.AFTER}"}
BAD_BODIES = {"malformed": documenting.MALFORMED_BODY, "too_large": b" " * (LARGEST_BODY + 1)}
ROUTES = Litestar(app.ENDPOINTS, openapi_config=None, **app.of_endpoints()).routes
HANDLERS = {
    handler.handler_name: handler
    for route in ROUTES
    if isinstance(route, HTTPRoute)
    for handler in route.route_handlers
}


async def provoke(client: httpx.AsyncClient, issuer: Issuer, path: str, method: str, name: str) -> Any:
    """Call an operation so that it fails like the example with this name."""
    operation = DOCUMENT["paths"][path][method]
    refused = HANDLERS[operation["operationId"]].opt["documented"].refused
    queries = BAD_QUERIES | {"refused_parameters": refused.decode()}
    url = f"{path.replace('{uuid}', examples.UUID)}?{queries.get(name, '')}"
    headers = bearer(issuer.token(**BAD_CLAIMS.get(name, {}))) | {"Content-Type": "application/json"}
    headers |= BAD_HEADERS.get(name, {})
    if name == "key_reused":
        first = await client.post(url, json=examples.FULL_REQUEST, headers=headers)
        assert first.status_code == 200
    content = operation.get("requestBody", {}).get("content")
    if content is not None:
        example, *_ = content["application/json"]["examples"].values()
        bodies = BAD_BODIES | {"refused_fields": refused}
        content = bodies.get(name, msgspec.json.encode(example["value"]))
    request = client.build_request(method.upper(), url, content=content, headers=headers)
    if name == "no_token":
        del request.headers["Authorization"]
    return await client.send(request)


FAILURES = [example for example in EXAMPLES if example[2] != "200"]
ELSEWHERE = {
    "unforeseen",  # in test_create_request.py
    "database_unavailable",  # in test_http_errors.py
    "signing_keys_unavailable",  # in test_authorization_server.py
    "secret_key_missing",  # in test_request_secrets.py
    "erased",  # in test_retrieve_request.py: only a command erases
    *("withdrawn", "too_many"),  # in test_send_email.py: each takes calls before it
    "key_in_flight",  # in test_idempotency.py: it takes two callers
    "too_slow",  # in test_http_server.py: it takes its time
}


@pytest.mark.parametrize(
    ("path", "method", "status", "name", "value"),
    [failure for failure in FAILURES if failure[3] not in ELSEWHERE],
)
async def test_failures_are_answered_as_documented(client, issuer, path, method, status, name, value):
    response = await provoke(client, issuer, path, method, name)

    assert response.status_code == int(status)
    assert response.json() | {"meta": None} == value | {"meta": None}
    described = DOCUMENT["paths"][path][method]["responses"][status]["headers"]
    for header in ("X-Request-Id", "Retry-After", "WWW-Authenticate"):
        assert header not in response.headers or header in described
