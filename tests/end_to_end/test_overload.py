"""More callers than Postgres can serve: as many as possible are served, the others refused at once."""

import asyncio
import statistics
import time

import httpx
import pytest

from tests.end_to_end.callers import client_of
from tests.harness.examples import A_REQUEST
from tests.harness.processes import api_process, started

STATEMENT_SECONDS = 0.04  # So long that even a busy machine can send twice the load: see LARGEST_GROUP.
CONNECTIONS = 2
CAPACITY = CONNECTIONS / STATEMENT_SECONDS  # requests a second, at best
LOAD_SECONDS = 10.0
TIMEOUT_SECONDS = 1.0  # A caller waits half of it for a connection.
LONGEST_WAIT_SECONDS = 2.5  # The service refuses after 0.5 s at most; the rest is for a busy machine.


async def closed_loop(client: httpx.AsyncClient, seconds: float) -> float:
    """Return how many requests a second are served if there are as many callers as connections."""
    end = time.perf_counter() + seconds

    async def call_again_and_again() -> int:
        served = 0
        while time.perf_counter() < end:
            served += (await client.post("/v1/request", json=A_REQUEST)).is_success
        return served

    served = await asyncio.gather(*(call_again_and_again() for _ in range(CONNECTIONS)))
    return sum(served) / (time.perf_counter() - end + seconds)


async def open_loop(client: httpx.AsyncClient, rate: float, seconds: float) -> list[httpx.Response]:
    """Send *rate* requests a second, even if earlier ones are not answered."""
    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        calls = []
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0, began + number / rate - time.perf_counter()))
            calls.append(group.create_task(client.post("/v1/request", json=A_REQUEST)))
    return [sent.result() for sent in calls]


@pytest.mark.long
async def test_at_twice_the_load_it_can_bear_most_of_what_it_can_serve_is_served(
    service_settings, issuer, database, tmp_path
):
    await database.execute(
        f"""
        CREATE FUNCTION take_time() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN PERFORM pg_sleep({STATEMENT_SECONDS}); RETURN new; END $$;
        CREATE TRIGGER slow BEFORE INSERT ON calculation_request
            FOR EACH ROW EXECUTE FUNCTION take_time()
        """
    )
    limits = {"DATABASE_TIMEOUT_SECONDS": str(TIMEOUT_SECONDS), "DATABASE_POOL_SIZE": str(CONNECTIONS)}
    api = api_process(service_settings, tmp_path, **limits)
    async with started(api), client_of(api, issuer.token()) as client:
        capacity = await closed_loop(client, 2.0)
        answers = await open_loop(client, 2 * CAPACITY, LOAD_SECONDS)
        after = [await closed_loop(client, 1.0) for _ in range(5)]  # Others use the machine, too.

    goodput = sum(answer.is_success for answer in answers) / LOAD_SECONDS
    refused = [answer for answer in answers if not answer.is_success]
    print(f"{capacity=:.1f}/s {after=}/s {goodput=:.1f}/s")  # noqa: T201 - pytest shows it on failure
    assert {(answer.status_code, answer.headers["Retry-After"]) for answer in refused} == {(503, "1")}
    assert statistics.median(answer.elapsed.total_seconds() for answer in refused) < LONGEST_WAIT_SECONDS
    assert goodput >= 0.6 * min(capacity, *after)
    assert max(after) >= 0.5 * capacity
    assert "Traceback" not in api.output
    stored = await database.fetchval("SELECT count(*) FROM calculation_request")
    assert stored >= goodput * LOAD_SECONDS
