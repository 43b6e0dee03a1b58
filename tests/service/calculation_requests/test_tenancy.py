"""No route and no statement shows a conveyancer anything of another one, not even that it exists."""

import ast
import importlib
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import msgspec
import pytest

import service
from service import api, calculation_requests
from service.api.outer_layer import OuterLayer
from service.app import create_api
from service.identifiers import new_request_id, uuid_of
from service.server import probes
from service.settings import ServiceSettings
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.issuer import Issuer
from tests.harness.statement_log import StatementLog
from tests.harness.tcp_proxy import TcpProxy

# What the stranger asks for: something of the other conveyancer, or something that does not exist.
OTHERS_KEY, OTHERS_CASE = "the-others-key", "the-others-case"

_SAME_SECONDS = 0.001  # Differences below are not looked for.
_LEAST_SAMPLES, _MOST_SAMPLES = 50, 1000


class Named(msgspec.Struct, frozen=True):
    """What a call can refer to."""

    uuid: str
    idempotency_key: str
    external_id: str


Call = Callable[[httpx.AsyncClient, Named], Awaitable[httpx.Response]]


async def create(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    body = A_REQUEST | {"external_id": "case"}
    return await stranger.post("/v1/request", json=body, headers={"Idempotency-Key": named.idempotency_key})


async def retrieve(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    return await stranger.get(f"/v1/request/{named.uuid}")


async def list_events(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    return await stranger.get(f"/v1/request/{named.uuid}/events")


async def list_by_external_id(stranger: httpx.AsyncClient, named: Named) -> httpx.Response:
    return await stranger.get("/v1/request", params={"external_id": named.external_id})


CALLS: dict[tuple[str, str], Call] = {
    ("POST", "/v1/request"): create,
    ("GET", "/v1/request"): list_by_external_id,
    ("GET", "/v1/request/{uuid:str}"): retrieve,
    ("GET", "/v1/request/{uuid:str}/events"): list_events,
}
THE_SAME_FOR_EVERY_CALLER = {
    *(("GET", path) for path in probes.PATHS),
    ("GET", "/v1/questionnaire/structure"),
    ("GET", "/schema/openapi.json"),
    ("GET", "/schema/asyncapi.json"),
    ("GET", "/schema"),
    ("GET", "/schema/{asset:str}"),
}
# The functions whose statements act for every conveyancer. Only the worker and the doctor may call them.
FOR_EVERY_CONVEYANCER = {
    "reading.find_existing",
    "reading.lock_all",
    "reading.lock_free",
    "reading.sample_secret_keys",
    "storing.announce",
    "erased.read_time",
    "event_history.read",
    "event_history.read_erased",
    "event_history.read_page",
}
# Nor do these name a conveyancer: its own secret, or the right of an internal reader, opens the request.
FOR_OTHERS_THAN_CONVEYANCERS = {
    "erased.among",
    "erased.check",
    "event_history.read_internally",
    "reading.find_by_secret",
    "reading.read_internally",
}


@pytest.fixture
async def stranger(client: httpx.AsyncClient, issuer: Issuer) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the same API with a token of the other conveyancer."""
    headers = {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers) as connected:
        yield connected


@pytest.fixture
async def others(client: httpx.AsyncClient) -> Named:
    """A request of the other conveyancer."""
    response = await client.post(
        "/v1/request",
        json=A_REQUEST | {"external_id": OTHERS_CASE},
        headers={"Idempotency-Key": OTHERS_KEY},
    )
    return Named(response.json()["data"]["uuid"], OTHERS_KEY, OTHERS_CASE)


def nothing() -> Named:
    """Return names of data that does not exist."""
    return Named(uuid_of(new_request_id()), "unused-key", "unused-case")


def test_every_route_is_covered(service_settings: ServiceSettings) -> None:
    routes = {
        (method, route.path)
        for route in create_api(service_settings).routes
        for method in getattr(route, "methods", ())
        if method != "OPTIONS"
    }

    assert routes - CALLS.keys() - THE_SAME_FOR_EVERY_CALLER == set()


@pytest.mark.parametrize("call", CALLS.values(), ids=[" ".join(route) for route in CALLS])
async def test_data_of_another_conveyancer_is_answered_like_data_that_does_not_exist(
    stranger: httpx.AsyncClient, others: Named, call: Call
) -> None:
    answers = [await call(stranger, named) for named in (others, nothing())]

    assert answers[0].status_code == answers[1].status_code
    assert comparable_headers(answers[0]) == comparable_headers(answers[1])
    assert comparable(answers[0].json()) == comparable(answers[1].json())
    assert others.uuid not in answers[0].text


async def test_own_request_is_found(client: httpx.AsyncClient, others: Named) -> None:
    """Or the comparison above would compare two failures."""
    assert (await retrieve(client, others)).status_code == 200
    assert (await list_events(client, others)).status_code == 200


async def test_questionnaire_is_the_same_for_every_conveyancer(
    client: httpx.AsyncClient, stranger: httpx.AsyncClient
) -> None:
    own, strangers = [await each.get("/v1/questionnaire/structure") for each in (client, stranger)]

    assert comparable(own.json()) == comparable(strangers.json())
    assert comparable_headers(own) == comparable_headers(strangers)


def test_every_statement_that_the_api_makes_names_its_conveyancer() -> None:
    statements: dict[str, list[str]] = {}
    for path in package_of(calculation_requests):
        statements |= statements_by_function(path.stem)

    of_the_api = statements.keys() - FOR_EVERY_CONVEYANCER - FOR_OTHERS_THAN_CONVEYANCERS
    assert of_the_api >= {
        "storing.insert",
        "event_history.find",
        "reading.find",
        "reading.find_by_idempotency_key",
        "reading.list_newest",
    }
    for name in of_the_api:
        for statement in statements[name]:
            assert names_its_conveyancer(statement), f"{name}: {statement}"


def test_api_uses_no_statement_that_acts_for_every_conveyancer() -> None:
    modules = {name.partition(".")[0] for name in FOR_EVERY_CONVEYANCER | FOR_OTHERS_THAN_CONVEYANCERS}
    users = [*package_of(api), *package_of(calculation_requests)]
    used = {path.stem: names_used(path, modules=modules) for path in users}

    assert used["handlers"] >= {"event_history.find", "reading.find", "reading.read_page", "storing.Storage"}
    assert used["fee_waiver"] >= {"reading.find_by_idempotency_key"}
    assert used["reading"] >= {"reading.find"}
    assert [name for name in used if used[name] & FOR_EVERY_CONVEYANCER] == []
    for_others = {name: used[name] & FOR_OTHERS_THAN_CONVEYANCERS for name in used}
    assert {name: uses for name, uses in for_others.items() if uses} == {
        "handlers": {"event_history.read_internally", "reading.find_by_secret", "reading.read_internally"},
        # for `read_internally` alone: test_erased_requests.py shows what another firm sees
        "erased": {"erased.among"},
        "event_history": {"erased.check"},
        "reading": {"erased.check"},
    }


def names_its_conveyancer(statement: str) -> bool:
    """Whether a statement is limited to one conveyancer: by its id, or by two bounds that both have it."""
    by_name = re.search(r"\bconveyancer(_id|\.id) = ", statement)
    from_bound = re.search(r"\(?conveyancer_id(, external_id)?\)? >= \(?\$1\b", statement)
    to_bound = re.search(r"\(conveyancer_id, (external_id, )?id\) < \(\$1, ", statement)
    return bool(by_name or (from_bound and to_bound))


def test_statements_on_requests_have_one_home_for_the_api_and_two_that_it_cannot_import() -> None:
    homes = {
        path.relative_to(package_path(service)).parent.as_posix()
        for path in package_of(service)
        if statements_in(ast.parse(path.read_text()))
    }

    assert homes == {"calculation_requests", "commands", "operations"}


async def test_data_of_another_conveyancer_costs_the_statements_of_data_that_does_not_exist(
    service_settings: ServiceSettings, issuer: Issuer, others: Named
) -> None:
    log = StatementLog()
    async with TcpProxy(service_settings.database_url, log.watch) as link:
        settings = msgspec.structs.replace(service_settings, database_url=link.url, database_pool_size=1)
        async with api_client(settings, issuer.token(FREE_CONVEYANCER)) as stranger:
            await retrieve(stranger, nothing())  # connects and prepares the statement
            costs = []
            for named in (others, nothing()):
                log.clear()
                assert (await retrieve(stranger, named)).status_code == 404
                costs.append((list(log.executed), log.round_trips))

    assert costs[0] == costs[1]
    assert costs[0][1] == 1


async def test_data_of_another_conveyancer_takes_as_long_as_data_that_does_not_exist(
    service_settings: ServiceSettings, issuer: Issuer, others: Named
) -> None:
    """The fastest of many are compared: whatever else the machine does only makes single ones slower.

    The API is called without a network, which would add more than the difference that is looked for.
    `python -m tests.benchmarks.rejections` prints the figures of the whole.
    """
    settings = msgspec.structs.replace(service_settings, log_level="WARNING", database_timeout_seconds=10.0)
    api = create_api(settings)
    headers = {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}
    logged: Any = OuterLayer(api)  # httpx has a narrower type of applications
    transport = httpx.ASGITransport(logged)
    fastest = [math.inf, math.inf]
    async with (
        api.lifespan(),
        httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as stranger,
    ):
        for number in range(_MOST_SAMPLES):
            for kind, named in enumerate((others, nothing())):
                fastest[kind] = min(fastest[kind], await seconds_to_find_nothing(stranger, named))
            if number >= _LEAST_SAMPLES and abs(fastest[0] - fastest[1]) < _SAME_SECONDS:
                return
    pytest.fail(f"the fastest took {fastest} seconds")


async def seconds_to_find_nothing(stranger: httpx.AsyncClient, named: Named) -> float:
    """Return how long it takes to be refused a request."""
    began = time.perf_counter()
    response = await retrieve(stranger, named)
    seconds = time.perf_counter() - began
    assert response.status_code == 404
    return seconds


def package_path(package: ModuleType) -> Path:
    """Return the folder of a package."""
    return Path(package.__path__[0])


def package_of(package: ModuleType) -> list[Path]:
    """Return the files of a package and of its subpackages."""
    return sorted(package_path(package).rglob("*.py"))


def statements_by_function(name: str) -> dict[str, list[str]]:
    """Return the SQL on calculation_request of each function of a module, with the constants that it uses.

    A constant that no function uses is listed under its own name.
    """
    module = importlib.import_module(f"{calculation_requests.__name__}.{name}")
    tree = ast.parse(Path(str(module.__file__)).read_text())
    constants = {
        constant: value
        for constant, value in vars(module).items()
        if isinstance(value, str) and not constant.startswith("__") and is_statement(value)
    }
    found: dict[str, list[str]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.AsyncFunctionDef | ast.FunctionDef):
            used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)} & constants.keys()
            if statements := statements_in(function) + [constants[constant] for constant in used]:
                found.setdefault(f"{name}.{function.name}", []).extend(statements)
    used_anywhere = {statement for statements in found.values() for statement in statements}
    return found | {
        f"{name}.{constant}": [value] for constant, value in constants.items() if value not in used_anywhere
    }


def statements_in(node: ast.AST) -> list[str]:
    """Return the SQL on calculation_request below a node."""
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return [constant for constant in constants if isinstance(constant, str) and is_statement(constant)]


def is_statement(text: str) -> bool:
    """Whether a text is SQL on requests, erased ones included."""
    return bool(re.search(r"\b(FROM|JOIN|INTO|UPDATE)\s+(calculation|erased)_request\b", text))


def names_used(path: Path, *, modules: Collection[str]) -> set[str]:
    """Return what a file uses of these modules, as `module.name`: by module, imported, or as its own."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
                found.add(f"{module}.{name}")
            case ast.Name(id=name) if path.stem in modules:
                found.add(f"{path.stem}.{name}")
            case ast.ImportFrom(module=str(source), names=names) if source.rpartition(".")[2] in modules:
                found |= {f"{source.rpartition('.')[2]}.{alias.name}" for alias in names}
    return found


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body without the values that differ each time."""
    data = body["data"]
    if isinstance(data, dict):
        differs = {"uuid", "created_at", "updated_at", "secret", "request_url"}
        data = {name: value for name, value in data.items() if name not in differs}
    return body | {"data": data, "meta": None}


def comparable_headers(response: httpx.Response) -> list[tuple[str, str]]:
    """Return the headers, in order, without those that differ each time."""
    return [(name, value) for name, value in response.headers.items() if name not in {"date", "x-request-id"}]
