"""No route and no statement shows a conveyancer anything of another's, not even that it exists."""

import ast
import re
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import service
from service.api import handlers
from service.app import create_api
from service.calculation_requests import storing
from service.identifiers import new_request_id, uuid_of
from service.settings import ServiceSettings
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer

# What the stranger names: something of the other conveyancer's, or something that does not exist.
OTHERS_KEY, OTHERS_CASE = "the-others-key", "the-others-case"


class Named(msgspec.Struct, frozen=True):
    """What a call can name."""

    uuid: str
    idempotency_key: str
    external_id: str


Call = Callable[[httpx.AsyncClient, Named], Awaitable[httpx.Response]]


async def create(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    body = A_REQUEST | {"external_id": "case"}
    return await stranger.post("/v1/request", json=body, headers={"Idempotency-Key": named.idempotency_key})


async def retrieve(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    return await stranger.get(f"/v1/request/{named.uuid}")


async def list_by_external_id(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    return await stranger.get("/v1/request", params={"external_id": named.external_id})


CALLS: dict[tuple[str, str], Call] = {
    ("POST", "/v1/request"): create,
    ("GET", "/v1/request"): list_by_external_id,
    ("GET", "/v1/request/{uuid:str}"): retrieve,
}
THE_SAME_FOR_EVERYBODY = {
    ("GET", "/v1/questionnaire/structure"),
    ("GET", "/schema/openapi.json"),
    ("GET", "/schema"),
    ("GET", "/schema/{asset:str}"),
    ("GET", "/livez"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
}
# Whose statements on calculation_request act for every conveyancer: for the consumers and the doctor alone.
FOR_EVERYBODY = {"read", "lock", "record_calculation", "announce", "sample_secret_keys"}


@pytest.fixture
async def stranger(client: httpx.AsyncClient, issuer: Issuer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the same API with a token of the other conveyancer."""
    headers = {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers) as connected:
        yield connected


@pytest.fixture
async def others(client: httpx.AsyncClient) -> Named:
    """What is the other conveyancer's."""
    response = await client.post(
        "/v1/request",
        json=A_REQUEST | {"external_id": OTHERS_CASE},
        headers={"Idempotency-Key": OTHERS_KEY},
    )
    return Named(response.json()["data"]["uuid"], OTHERS_KEY, OTHERS_CASE)


def nobodys() -> Named:
    """Return what does not exist."""
    return Named(uuid_of(new_request_id()), "nobodys-key", "nobodys-case")


def test_every_route_is_looked_at(service_settings: ServiceSettings) -> None:
    routes = {
        (method, route.path)
        for route in create_api(service_settings).routes
        for method in getattr(route, "methods", ())
        if method != "OPTIONS"
    }

    assert routes - CALLS.keys() - THE_SAME_FOR_EVERYBODY == set()


@pytest.mark.parametrize("call", CALLS.values(), ids=[" ".join(route) for route in CALLS])
async def test_what_is_anothers_looks_like_what_is_nobodys(
    stranger: httpx.AsyncClient, others: Named, call: Call
) -> None:
    answers = [await call(stranger, named) for named in (others, nobodys())]

    assert answers[0].status_code == answers[1].status_code
    assert comparable_headers(answers[0]) == comparable_headers(answers[1])
    assert comparable(answers[0].json()) == comparable(answers[1].json())
    assert others.uuid not in answers[0].text


async def test_what_is_ones_own_is_found(client: httpx.AsyncClient, others: Named) -> None:
    """Or the comparison above would compare two failures."""
    assert (await retrieve(client, others)).status_code == 200


async def test_questionnaire_is_the_same_for_everybody(
    client: httpx.AsyncClient, stranger: httpx.AsyncClient
) -> None:
    own, strangers = [await each.get("/v1/questionnaire/structure") for each in (client, stranger)]

    assert comparable(own.json()) == comparable(strangers.json())
    assert comparable_headers(own) == comparable_headers(strangers)


def test_every_statement_that_the_api_makes_names_its_conveyancer() -> None:
    statements = statements_by_name(Path(storing.__file__))
    used = names_used(Path(handlers.__file__), module="calculation_requests")

    assert used & FOR_EVERYBODY == set()
    assert {"INSERT", "find", "_list_newest"} <= statements.keys() - FOR_EVERYBODY
    for name in statements.keys() - FOR_EVERYBODY:
        for statement in statements[name]:
            assert names_its_conveyancer(statement), f"{name}: {statement}"


def names_its_conveyancer(statement: str) -> bool:
    """Whether a statement is for one conveyancer alone: by name, or between two bounds that both name it."""
    by_name = re.search(r"\bconveyancer(_id|\.id) = ", statement)
    from_bound = re.search(r"\(?conveyancer_id(, external_id)?\)? >= \(?\$1\b", statement)
    to_bound = re.search(r"\(conveyancer_id, (external_id, )?id\) < \(\$1, ", statement)
    return bool(by_name or (from_bound and to_bound))


def test_statements_on_requests_have_one_home() -> None:
    homes = {
        path.stem
        for path in Path(service.__path__[0]).glob("*.py")
        if statements_in(ast.parse(path.read_text()))
    }

    assert homes == {"calculation_requests"}


async def test_what_is_anothers_takes_as_long_as_what_is_nobodys(
    service_settings: ServiceSettings, issuer: Issuer, others: Named
) -> None:
    """A bound that a busy machine keeps; `python -m tests.benchmarks.rejections` has the figures."""
    settings = msgspec.structs.replace(service_settings, log_level="WARNING")
    async with api_client(settings, issuer.token(FREE_CONVEYANCER)) as stranger:
        for _ in range(3):  # A pause of the machine's may spoil one measurement, hardly three.
            medians = await interleaved_medians(stranger, others, samples=150)
            if abs(medians[0] - medians[1]) < 0.2 * min(medians):
                return
    pytest.fail(f"medians of {medians} seconds differ")


async def interleaved_medians(
    stranger: httpx.AsyncClient, others: Named, *, samples: int
) -> tuple[float, float]:
    """Return the median seconds of retrieving what is another's, and what is nobody's."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * samples):
        named = nobodys() if number % 2 else others
        started_at = time.perf_counter()
        response = await retrieve(stranger, named)
        seconds[number % 2].append(time.perf_counter() - started_at)
        assert response.status_code == 404
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def statements_by_name(path: Path) -> dict[str, list[str]]:
    """Return the SQL on calculation_request in each function and constant of a module."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.AsyncFunctionDef(name=name) | ast.FunctionDef(name=name):
                found[name] = statements_in(node)
            case ast.Assign(targets=[ast.Name(id=name)]) if name.isupper():
                found[name] = statements_in(node)
    return {name: statements for name, statements in found.items() if statements}


def statements_in(node: ast.AST) -> list[str]:
    """Return the SQL on calculation_request anywhere below a node."""
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    texts = [constant for constant in constants if isinstance(constant, str)]
    return [text for text in texts if re.search(r"\b(FROM|JOIN|INTO|UPDATE)\s+calculation_request\b", text)]


def names_used(path: Path, *, module: str) -> set[str]:
    """Return what a module uses of another: `module.name`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == module
    }


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without what differs each time."""
    data = body["data"]
    if isinstance(data, dict):
        differs = {"uuid", "created_at", "updated_at", "secret", "request_url"}
        data = {name: value for name, value in data.items() if name not in differs}
    return body | {"data": data, "meta": None}


def comparable_headers(response: httpx.Response) -> list[tuple[str, str]]:
    """Return the headers, in order, without what differs each time."""
    return [(name, value) for name, value in response.headers.items() if name not in {"date", "x-request-id"}]
