"""More callers than Postgres can serve: as many as possible are served, the others refused at once."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence

import httpx
import msgspec
import pytest

from tests.end_to_end.callers import client_of
from tests.harness.examples import A_REQUEST
from tests.harness.processes import api_process, started

STATEMENT_SECONDS = 0.2  # So long that even a busy machine can send twice the load.
CONNECTIONS = 2
CAPACITY = CONNECTIONS / STATEMENT_SECONDS  # requests a second, at best
LOAD_SECONDS = 5.0
TIMEOUT_SECONDS = 1.0  # A caller waits half of it for a connection.
LONGEST_WAIT_SECONDS = 2.5  # The service refuses after 0.5 s at most; the rest is for a busy machine.


class Answer(msgspec.Struct, frozen=True):
    """The answer to one caller, and after how long."""

    status: int
    retry_after: str | None
    seconds: float


async def call(client: httpx.AsyncClient) -> Answer:
    started_at = time.perf_counter()
    response = await client.post("/v1/request", json=A_REQUEST)
    seconds = time.perf_counter() - started_at
    return Answer(response.status_code, response.headers.get("Retry-After"), seconds)


async def closed_loop(client: httpx.AsyncClient, seconds: float) -> float:
    """Return how many requests a second are served if there are as many callers as connections."""
    started_at = time.perf_counter()

    async def call_again_and_again() -> int:
        served = 0
        while time.perf_counter() - started_at < seconds:
            answer = await call(client)
            served += answer.status == 200
        return served

    served = await asyncio.gather(*(call_again_and_again() for _ in range(CONNECTIONS)))
    return sum(served) / (time.perf_counter() - started_at)


async def open_loop(client: httpx.AsyncClient, rate: float, seconds: float) -> list[Answer]:
    """Send *rate* requests a second, even if earlier ones are not answered."""
    started_at = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        calls = []
        for number in range(round(rate * seconds)):
            await asyncio.sleep(max(0, started_at + number / rate - time.perf_counter()))
            calls.append(group.create_task(call(client)))
    return [sent.result() for sent in calls]


def median_seconds(answers: Sequence[Answer]) -> float:
    """Return after how long these answers came."""
    return statistics.median(answer.seconds for answer in answers)


@pytest.mark.long
async def test_twice_the_load_it_can_bear_does_not_lower_what_is_served(
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
    settings = msgspec.structs.replace(
        service_settings,
        database_timeout_seconds=TIMEOUT_SECONDS,
        database_pool_size=CONNECTIONS,
    )
    api = api_process(settings, tmp_path)
    async with started(api), client_of(api, issuer.token()) as client:
        capacity = await closed_loop(client, 2.0)
        answers = await open_loop(client, 2 * CAPACITY, LOAD_SECONDS)
        after = await closed_loop(client, 1.0)

    served = [answer for answer in answers if answer.status == 200]
    refused = [answer for answer in answers if answer.status != 200]
    assert refused, "there was no overload"
    print(  # noqa: T201 - pytest shows it on failure
        f"{capacity=:.1f}/s {after=:.1f}/s goodput={len(served) / LOAD_SECONDS:.1f}/s",
        Counter(answer.status for answer in answers),
        f"slowest {max(a.seconds for a in served):.3f} s, refused {max(a.seconds for a in refused):.3f} s",
    )
    assert {(answer.status, answer.retry_after) for answer in refused} == {(503, "1")}
    assert median_seconds(refused) < LONGEST_WAIT_SECONDS
    # With an unbounded queue it was a fifth or less. The margin is for a busy machine.
    assert len(served) / LOAD_SECONDS >= 0.5 * min(capacity, after)
    assert after >= 0.3 * capacity
    assert "Traceback" not in api.output
    stored = await database.fetchval("SELECT count(*) FROM calculation_request")
    assert stored >= len(served)
