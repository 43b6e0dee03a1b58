"""The OpenAPI document, the page that shows it, and the files that the page loads."""

import html
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import jsonschema_rs
import msgspec
import pytest
from litestar import Litestar
from litestar.routes import HTTPRoute
from openapi_spec_validator import validate

from deploy.local.machine.folders import CHECKOUT
from service import app
from service.api.controllers.events import FeedQuery
from service.api.decoding import parse_query
from service.api.listing import FILTERS, ListQuery
from service.api.openapi import documenting, examples
from service.outbox import asyncapi
from service.outbox.events import RequestEvent
from service.server.limits import LARGEST_BODY
from tests.deploy.pages import API, README, WORKER
from tests.harness import stored
from tests.harness.endpoints import ENDPOINTS
from tests.harness.http import bearer, documented_errors, is_documented
from tests.harness.in_process import api_client, run
from tests.harness.processes import bare_environment

_TEXT = msgspec.json.encode(app.describe())
DOCUMENT = msgspec.json.decode(_TEXT)
SCHEMAS = DOCUMENT["components"]["schemas"]
EXAMPLES = [
    (path, method, status, name, example["value"])
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    for status, response in operation["responses"].items()
    for name, example in response.get("content", {}).get("application/json", {}).get("examples", {}).items()
]
NO_TOKEN = {"Authorization": ""}


def answers_of(path: str, method: str, status: str = "200") -> Any:
    """Return the schema and the examples of an answer."""
    return DOCUMENT["paths"][path][method]["responses"][status]["content"]["application/json"]


def validator(schema: dict[str, Any]) -> jsonschema_rs.Draft202012Validator:
    """Return what checks values against a schema of the document, including formats."""
    whole = {**schema, "components": DOCUMENT["components"]}
    return jsonschema_rs.Draft202012Validator(whole, validate_formats=True)


def references(page: str) -> tuple[list[str], list[str]]:
    """Return the URLs that a page links to, and those of the files that it loads."""
    found = re.findall(r'<(\w+)\s[^>]*?\b(?:src|href)="([^"]+)"', page)
    return [url for tag, url in found if tag == "a"], [url for tag, url in found if tag != "a"]


def test_document_is_valid_and_its_schemas_are_as_client_generators_need_them():
    validate(DOCUMENT)
    fields = [field for schema in SCHEMAS.values() for field in schema.get("properties", {}).values()]
    assert [field for field in fields if "default" in field or not field.keys() & {"type", "$ref"}] == []
    assert SCHEMAS["CreateBody"]["properties"]["customer_phone"]["type"] == ["string", "null"]
    for name in ("CreateBody", "CalculationRequestView", "RetrievedCalculationRequest"):
        assert SCHEMAS[name]["properties"]["meta_data"]["additionalProperties"] is True
    assert b'"type":"null"' not in _TEXT
    assert "enum" not in SCHEMAS["FieldError"]["properties"]["code"], "a later release may add codes"


async def test_event_of_each_type_fits_its_own_schema_and_no_other(client, database):
    request = await stored.insert_with_each_event(database)
    response = (await client.get(f"/v1/request/{request.uuid}/events")).json()

    validator(answers_of("/v1/request/{uuid}/events", "get")["schema"]).validate(response)
    union = SCHEMAS[asyncapi.schema_name(RequestEvent)]
    types, (*_, another) = dict(union["discriminator"]["mapping"]), union["oneOf"]
    for event in response["data"]["events"]:
        (fitting,) = [each["$ref"] for each in union["oneOf"] if validator(each).is_valid(event)]
        assert fitting == types.pop(event["type"], another["$ref"])
        described = SCHEMAS[fitting.rpartition("/")[2]]["properties"]
        data = SCHEMAS[described["data"]["$ref"].rpartition("/")[2]]["properties"]
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
    codes = {*SCHEMAS["FieldError"]["properties"]["code"]["examples"]}

    shown = {error["code"] for *_, value in EXAMPLES for error in value["errors"] or ()}
    named = re.findall(r"`(\w+)`", DOCUMENT["info"]["description"])
    assert codes <= shown | set(named)
    assert codes == {code.strip("`") for _, code, *_ in documented_errors()}


@pytest.mark.parametrize(("path", "method", "status", "name", "value"), EXAMPLES)
def test_example_fits_its_schema(path, method, status, name, value):
    validator(answers_of(path, method, status)["schema"]).validate(value)
    assert value["status"]["code"] == int(status), name
    for error in value["errors"] or ():
        assert is_documented(int(status), error["code"], error["message"])


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
BAD_BODIES = {"malformed": documenting.MALFORMED_BODY, "too_large": b" " * (LARGEST_BODY + 1)}
HANDLERS = {
    handler.handler_name: handler
    for route in Litestar(app.ENDPOINTS, openapi_config=None, **app.of_endpoints()).routes
    if isinstance(route, HTTPRoute)
    for handler in route.route_handlers
}
ELSEWHERE = {
    *("unforeseen", "key_in_flight"),  # in test_create_request.py
    "database_unavailable",  # in test_http_errors.py
    "signing_keys_unavailable",  # in test_authenticator.py
    *("secret_key_missing", "erased"),  # in test_retrieve_request.py
    *("withdrawn", "too_many"),  # in test_changes.py: each takes calls before it
    "too_slow",  # in test_http_server.py: it takes its time
}


@pytest.mark.parametrize(
    ("path", "method", "status", "name", "value"),
    [example for example in EXAMPLES if example[2] != "200" and example[3] not in ELSEWHERE],
)
async def test_failures_are_answered_as_documented(shared_client, issuer, path, method, status, name, value):
    operation = DOCUMENT["paths"][path][method]
    refused = HANDLERS[operation["operationId"]].opt["documented"].refused
    queries = {"cursor_outdated": f"after={examples.AFTER}", "refused_parameters": refused.decode()}
    url = f"{path.replace('{uuid}', examples.UUID)}?{queries.get(name, '')}"
    headers = bearer(issuer.token(**BAD_CLAIMS.get(name, {}))) | {"Content-Type": "application/json"}
    headers |= BAD_HEADERS.get(name, {})
    if name == "key_reused":
        first = await shared_client.post(url, json=examples.FULL_REQUEST, headers=headers)
        assert first.status_code == 200
    content = operation.get("requestBody", {}).get("content")
    if content is not None:
        example, *_ = content["application/json"]["examples"].values()
        bodies = BAD_BODIES | {"refused_fields": refused}
        content = bodies.get(name, msgspec.json.encode(example["value"]))
    request = shared_client.build_request(method.upper(), url, content=content, headers=headers)
    if name == "no_token":
        del request.headers["Authorization"]

    response = await shared_client.send(request)

    assert response.status_code == int(status)
    assert response.json() | {"meta": None} == value | {"meta": None}
    described = operation["responses"][status]["headers"]
    for header in ("X-Request-Id", "Retry-After", "WWW-Authenticate"):
        assert header not in response.headers or header in described


async def test_address_of_the_api_leads_to_the_page_which_loads_nothing_from_elsewhere(shared_client):
    root, page = [await shared_client.get(path, headers=NO_TOKEN) for path in ("/", "/schema")]

    assert (root.status_code, root.headers["Location"]) == (302, "/schema")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "connect-src 'self';" in page.headers["Content-Security-Policy"]
    _, loaded = references(page.text)
    loaded.remove("data:,")  # the empty icon, so that no browser asks for one
    assert {Path(urlsplit(url).path).suffix for url in loaded} == {".css", ".js"}
    for url in loaded:
        assert url.startswith("/schema/")
        asset = await shared_client.get(url, headers=NO_TOKEN)
        assert asset.status_code == 200
        if ".css" in url:
            assert all(used.startswith("data:") for used in re.findall(r"url\([\"']?([^)]*)", asset.text))
    for name in ("index.html", "nothing.js", "events", "..%2f__init__.py", "..%2fpage.py"):
        other = await shared_client.get(f"/schema/{name}")
        assert (other.status_code, other.json()["errors"][0]["code"]) == (404, "not_found")


async def test_page_leads_to_both_documents_which_a_command_prints_without_any_setting(shared_client):
    linked, _ = references((await shared_client.get("/schema")).text)
    documents = {url for url in linked if not url.startswith("#")}
    assert documents == {"/schema/openapi.json", "/schema/asyncapi.json"}

    for name in ("openapi", "asyncapi"):
        served = await shared_client.get(f"/schema/{name}.json", headers=NO_TOKEN)
        printed = await run("service", name, environment=bare_environment())
        assert served.headers["Content-Type"] == "application/json"
        assert (printed.status, printed.errors) == (0, "")
        assert served.json() == msgspec.json.decode(printed.output)


def test_links_to_an_operation_lead_to_one_of_the_document():
    paths = DOCUMENT["paths"].items()
    named = [f"#{method}-{re.sub('[{}]', '-', path)}" for path, item in paths for method in item]
    journey = CHECKOUT / "deploy" / "local" / "journey" / "templates" / "journey.html"
    links = re.findall('"(#[^"]+)"', journey.read_text())
    links += [
        link for page in (README, API, WORKER) for link in re.findall(r"/schema(#[^\s`)]+)", page.read_text())
    ]

    assert len(links) >= 4
    assert [link for link in links if link not in named] == []


async def test_page_and_document_name_the_issuer_and_what_its_tokens_need(service_settings):
    named = {"auth_issuer": "https://<issuer>", "auth_client_claim": "firm", "auth_scope_prefix": "id/"}
    async with api_client(service_settings, None, auth_audience="a&b", **named) as caller:
        page, document = [await caller.get(path) for path in ("/schema", "/schema/openapi.json")]
    async with api_client(service_settings, None, auth_audience=None, auth_clients="acme") as caller:
        without_audience = (await caller.get("/schema")).text

    assert "the audience a&amp;b," in page.text
    for each in ("https://<issuer>", "firm", "id/request:write", "id/request:read"):
        assert f"<code>{html.escape(each)}</code>" in page.text
    create = document.json()["paths"]["/v1/request"]["post"]
    assert create["security"] == [{"access_token": ["id/request:write"]}]
    assert not re.search("[^/]request:(read|write)", document.text)
    assert "audience" not in without_audience
    assert "None" not in without_audience
