"""The OpenAPI document."""

import re
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest
from litestar.handlers import BaseRouteHandler
from openapi_spec_validator import validate

from deploy.local.machine.ports import free_port
from service.api import handlers, questionnaire
from service.authentication import api_keys
from service.contracts import endpoints, openapi
from tests.harness import documented_errors
from tests.harness.command_line import run
from tests.harness.examples import CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer
from tests.harness.processes import bare_environment

DOCUMENT = msgspec.json.decode(msgspec.json.encode(openapi.document()))
EXAMPLES = [
    (path, method, status, name, example["value"])
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    for status, response in operation["responses"].items()
    for name, example in response.get("content", {}).get("application/json", {}).get("examples", {}).items()
]


def operation_of(path: str, method: str) -> dict[str, Any]:
    operation: dict[str, Any] = DOCUMENT["paths"][path][method]
    return operation


def check(schema: dict[str, Any], value: Any) -> None:
    """Check *value* against a schema of the document, including formats."""
    whole = {**schema, "components": DOCUMENT["components"]}
    jsonschema_rs.Draft202012Validator(whole, validate_formats=True).validate(value)


async def test_document_is_printed_without_any_setting(client):
    printed = await run("service", "openapi", environment=bare_environment())
    served = await client.get("/schema/openapi.json", headers={"Authorization": ""})

    assert (printed.status, printed.errors) == (0, "")
    assert served.headers["Content-Type"] == "application/json"
    assert served.json() == msgspec.json.decode(printed.output)


def test_document_is_valid():
    validate(DOCUMENT)


async def test_document_has_the_token_url_where_it_is_known(service_settings):
    token_url = "https://issuer.test/token"
    async with api_client(service_settings, None, auth_token_url=token_url) as caller:
        document = (await caller.get("/schema/openapi.json")).json()

    validate(document)
    schemes = document["components"]["securitySchemes"]
    (flow,) = [scheme["flows"] for scheme in schemes.values() if scheme["type"] == "oauth2"]
    assert flow["clientCredentials"]["tokenUrl"] == token_url
    assert set(flow["clientCredentials"]["scopes"]) == {"request:write", "request:read", "request:read-all"}
    without = operation_of("/v1/request", "post")["security"]
    assert without == [{"access_token": ["request:write"]}]
    assert document["paths"]["/v1/request"]["post"]["security"] == [
        *without,
        {"client_credentials": ["request:write"]},
    ]


def test_patterns_mean_the_same_in_javascript_with_and_without_its_flag_u():
    patterns = re.findall(rb'"pattern":"((?:[^"\\]|\\.)*)"', msgspec.json.encode(DOCUMENT))

    assert len(patterns) > 10
    assert all(pattern.isascii() for pattern in patterns)


def test_every_endpoint_is_documented():
    values = [*vars(handlers).values(), *vars(questionnaire).values()]
    served = {value for value in values if isinstance(value, BaseRouteHandler)}

    assert {each.handler for each in endpoints.OPERATIONS} == served - {handlers.show_methods}


def test_document_and_page_for_callers_have_every_error_code_and_no_other():
    codes = {*DOCUMENT["components"]["schemas"]["FieldError"]["properties"]["code"]["enum"]}

    shown = {error["code"] for *_, value in EXAMPLES for error in value["errors"] or ()}
    named = re.findall(r"`(\w+)`", DOCUMENT["info"]["description"])
    assert codes <= shown | set(named)
    assert codes == {code.strip("`") for _, code, *_ in documented_errors.rows()}


def test_page_for_callers_says_why_each_error_happens_and_what_to_do():
    for *_, cause, remedy in documented_errors.rows():
        assert cause
        assert remedy not in ("", "as it says")


@pytest.mark.parametrize(("path", "method", "status", "name", "value"), EXAMPLES)
def test_example_fits_its_schema(path, method, status, name, value):
    content = operation_of(path, method)["responses"][status]["content"]["application/json"]

    check(content["schema"], value)
    assert value["status"]["code"] == int(status), name
    for error in value["errors"] or ():
        assert documented_errors.is_documented(int(status), error["code"], error["message"])


@pytest.mark.parametrize("name", ["smallest", "full"])
async def test_example_bodies_are_answered_as_documented(client, name):
    content = operation_of("/v1/request", "post")["requestBody"]["content"]["application/json"]
    body = content["examples"][name]["value"]

    created = await client.post("/v1/request", json=body)
    retrieved = await client.get(f"/v1/request/{created.json()['data']['uuid']}")
    events = await client.get(f"/v1/request/{created.json()['data']['uuid']}/events")

    check(content["schema"], body)
    for path, method, response in (
        ("/v1/request", "post", created),
        ("/v1/request/{uuid}/events", "get", events),
        ("/v1/request/{uuid}", "get", retrieved),
    ):
        shown = operation_of(path, method)["responses"]["200"]["content"]["application/json"]
        check(shown["schema"], response.json())
        assert response.json()["data"].keys() == shown["examples"]["ok"]["value"]["data"].keys()
    if name == "full":
        example = shown["examples"]["ok"]["value"]["data"]
        assert {field: created.json()["data"][field] for field in body} == {
            field: example[field] for field in body
        }


async def test_examples_of_a_record_are_what_each_kind_of_reader_gets(service_settings, issuer):
    content = operation_of("/v1/request/{uuid}", "get")["responses"]["200"]["content"]["application/json"]
    async with api_client(service_settings, issuer.token(), auth_internal_clients="reader") as client:
        created = (await client.post("/v1/request", json=endpoints.FULL_REQUEST)).json()["data"]
        tokens = {
            "ok": issuer.token(),
            "by_secret": created["secret"],
            "internal_reader": issuer.token("reader", scope="request:read-all"),
        }
        assert tokens.keys() == content["examples"].keys()
        for name, token in tokens.items():
            headers = {"Authorization": f"Bearer {token}"}
            response = await client.get(f"/v1/request/{created['uuid']}", headers=headers)

            check(content["schema"], response.json())
            example = content["examples"][name]["value"]["data"]
            shown = response.json()["data"]
            assert {field: shown[field] is None for field in shown} == {
                field: example[field] is None for field in example
            }


async def test_example_of_the_questionnaire_is_its_beginning(shared_client):
    response = await shared_client.get("/v1/questionnaire/structure")

    shown = operation_of("/v1/questionnaire/structure", "get")["responses"]["200"]["content"]
    example = shown["application/json"]["examples"]["ok"]["value"]["data"]["questionnaire"]
    check(shown["application/json"]["schema"], response.json())
    assert response.json()["data"] == msgspec.json.decode(msgspec.json.encode(questionnaire.load()))
    assert response.json()["data"]["questionnaire"][: len(example)] == example


# How to fail like the example with each name: by headers, claims of the token, or the body.
BAD_HEADERS = {
    "bad_host": {"Host": "a/b"},
    "not_bearer": {"Authorization": "Basic YTpi"},
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
BAD_BODIES = {
    "malformed": endpoints.MALFORMED_REQUEST.encode(),
    "too_large": b" " * endpoints.LARGE_REQUEST,
    "refused_fields": endpoints.REFUSED_REQUEST.encode(),
}
MISSING_HEADERS = {"no_token": "Authorization", "no_content_type": "Content-Type"}


async def provoke(
    client: httpx.AsyncClient, issuer: Issuer, path: str, method: str, name: str
) -> httpx.Response:
    """Call an operation so that it fails like the example with this name."""
    url = path.replace("{uuid}", DOCUMENT["components"]["parameters"]["uuid"]["example"])
    if name == "refused_parameters":
        url += f"?{endpoints.REFUSED_QUERY}"
    token = issuer.token(**BAD_CLAIMS.get(name, {}))
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    headers |= BAD_HEADERS.get(name, {})
    if name == "key_reused":
        first = await client.post(url, json=endpoints.FULL_REQUEST, headers=headers)
        assert first.status_code == 200
    body = BAD_BODIES.get(name, msgspec.json.encode(endpoints.SMALLEST_REQUEST))
    content = body if method == "post" else None
    request = client.build_request(method.upper(), url, content=content, headers=headers)
    if name in MISSING_HEADERS:
        del request.headers[MISSING_HEADERS[name]]
    return await client.send(request)


FAILURES = [example for example in EXAMPLES if example[2] != "200"]
OF_THE_SERVICE = {"unforeseen", "database_unavailable", "signing_keys_unavailable", "secret_key_missing"}
ELSEWHERE = {
    "erased",  # in test_retrieve_request.py: only a command erases
    "key_in_flight",  # in test_idempotency.py: it takes two callers
    "too_slow",  # in test_http_protocol.py: it takes its time
}


@pytest.mark.parametrize(
    ("path", "method", "status", "name", "value"),
    [failure for failure in FAILURES if failure[3] not in OF_THE_SERVICE | ELSEWHERE],
)
async def test_failures_are_answered_as_documented(client, issuer, path, method, status, name, value):
    response = await provoke(client, issuer, path, method, name)

    documented = operation_of(path, method)["responses"][status]
    assert response.status_code == int(status)
    assert response.json() | {"meta": None} == value | {"meta": None}
    for header, described in documented["headers"].items():
        assert (header in response.headers) or not described["required"]


async def test_failures_of_the_service_are_answered_as_documented(client, service_settings, database, issuer):
    key = await api_keys.create(database, CONVEYANCER)
    nowhere = f"postgresql://postgres@127.0.0.1:{free_port()}/none"
    no_database = msgspec.structs.replace(service_settings, database_url=nowhere)
    no_keys = msgspec.structs.replace(service_settings, auth_jwks_url="file:///nowhere/jwks.json")
    stored = await client.post("/v1/request", json=endpoints.SMALLEST_REQUEST)
    await database.execute("UPDATE calculation_request SET secret_key_id = 'lost'")
    await database.execute("ALTER TABLE calculation_request ADD CHECK (false) NOT VALID")
    async with api_client(no_database, key) as adrift, api_client(no_keys, issuer.token()) as locked:
        answers = {
            "unforeseen": await client.post("/v1/request", json=endpoints.SMALLEST_REQUEST),
            "database_unavailable": await adrift.get("/v1/questionnaire/structure"),
            "signing_keys_unavailable": await locked.get("/v1/questionnaire/structure"),
            "secret_key_missing": await client.get(f"/v1/request/{stored.json()['data']['uuid']}"),
        }

    assert answers.keys() == OF_THE_SERVICE
    for *_, status, name, value in FAILURES:
        if name in OF_THE_SERVICE:
            assert answers[name].status_code == int(status)
            assert answers[name].json() | {"meta": None} == value | {"meta": None}
