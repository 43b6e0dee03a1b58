"""No route and no statement shows a conveyancer anything of another one, not even that it exists."""

import re
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from service.app import create_api
from service.identifiers import new_request_id, uuid_of
from service.server import probes
from tests.harness.examples import A_REQUEST, FREE_CONVEYANCER
from tests.harness.in_process import api_client
from tests.harness.statement_log import StatementLog
from tests.harness.tcp_proxy import TcpProxy

# What the stranger asks for: something of the other conveyancer, or something that does not exist.
OTHERS_KEY, OTHERS_CASE = "the-others-key", "the-others-case"


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


@pytest.fixture
async def stranger(client, issuer):
    """A client of the same API with a token of the other conveyancer."""
    headers = {"Authorization": f"Bearer {issuer.token(FREE_CONVEYANCER)}"}
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers) as connected:
        yield connected


@pytest.fixture
async def others(client):
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


def test_every_route_is_covered(service_settings):
    routes = {
        (method, route.path)
        for route in create_api(service_settings).routes
        for method in getattr(route, "methods", ())
        if method != "OPTIONS"
    }

    assert routes - CALLS.keys() - THE_SAME_FOR_EVERY_CALLER == set()


@pytest.mark.parametrize("call", CALLS.values(), ids=[" ".join(route) for route in CALLS])
async def test_data_of_another_conveyancer_is_answered_like_data_that_does_not_exist(stranger, others, call):
    answers = [await call(stranger, named) for named in (others, nothing())]

    assert answers[0].status_code == answers[1].status_code
    assert comparable_headers(answers[0]) == comparable_headers(answers[1])
    assert comparable(answers[0].json()) == comparable(answers[1].json())
    assert others.uuid not in answers[0].text


async def test_own_request_is_found(client, others):
    """Or the comparison above would compare two failures."""
    assert (await retrieve(client, others)).status_code == 200
    assert (await list_events(client, others)).status_code == 200


async def test_questionnaire_is_the_same_for_every_conveyancer(client, stranger):
    own, strangers = [await each.get("/v1/questionnaire/structure") for each in (client, stranger)]

    assert comparable(own.json()) == comparable(strangers.json())
    assert comparable_headers(own) == comparable_headers(strangers)


def names_its_conveyancer(statement: str) -> bool:
    """Whether a statement is limited to one conveyancer: by its id, or by two bounds that both have it."""
    by_name = re.search(r"\bconveyancer(_id|\.id) = ", statement)
    from_bound = re.search(r"\(?conveyancer_id(, external_id)?\)? >= \(?\$1\b", statement)
    to_bound = re.search(r"\(conveyancer_id, (external_id, )?id\) < \(\$1, ", statement)
    return bool(by_name or (from_bound and to_bound))


async def test_every_statement_of_a_conveyancers_calls_names_it(
    service_settings, issuer, others, link, statements
):
    settings = msgspec.structs.replace(service_settings, database_url=link.url)
    async with api_client(settings, issuer.token(FREE_CONVEYANCER)) as stranger:
        waived = A_REQUEST | {"calculation_fee_exempt": True}
        for _ in range(2):
            await stranger.post("/v1/request", json=waived, headers={"Idempotency-Key": "k"})
        await stranger.get("/v1/request")
        for call in CALLS.values():
            for named in (others, nothing()):
                await call(stranger, named)

    about_requests = {each for each in statements.executed if re.search("(calculation|erased)_request", each)}
    assert len(about_requests) >= 6  # a create, its repeat, one request, its events, and two lists
    for statement in about_requests:
        assert names_its_conveyancer(statement), statement


async def test_data_of_another_conveyancer_costs_the_statements_of_data_that_does_not_exist(
    service_settings, issuer, others
):
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
