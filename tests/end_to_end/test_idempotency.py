"""One key from many callers while the API is killed: one request, one event, one e-mail."""

import asyncio
import random
from functools import partial

import httpx
import pytest

from tests.harness.examples import A_REQUEST
from tests.harness.processes import started
from tests.harness.waiting import eventually

_TIMES = 1000
_CALLERS = 64
_KILLS = 4
_PAUSE_SECONDS = 0.05  # while the API is down


@pytest.mark.long
async def test_request_sent_a_thousand_times_with_one_key_is_stored_and_mailed_once(
    *, api, worker, issuer, database, subscriber, mail_server
):
    answers: list[httpx.Response] = []
    errors: list[httpx.TransportError] = []

    async def call() -> None:
        while len(answers) < _TIMES:
            try:
                answers.append(await client.post("/v1/request", json=A_REQUEST))
            except httpx.TransportError as error:
                errors.append(error)
                await asyncio.sleep(_PAUSE_SECONDS)

    def are_answered(calls: int) -> bool:
        return len(answers) >= calls

    chance = random.Random(20)  # noqa: S311 - the same moments in every run
    client = httpx.AsyncClient(
        base_url=api.base_url,
        headers={"Authorization": f"Bearer {issuer.token()}", "Idempotency-Key": "case-17"},
        limits=httpx.Limits(max_connections=_CALLERS),
        timeout=30,
    )
    async with client, started(api, worker):
        async with asyncio.TaskGroup() as callers:
            for _ in range(_CALLERS):
                callers.create_task(call())
            for number in range(_KILLS):
                goal = number * _TIMES // (_KILLS + 1) + chance.randint(0, 50)
                await eventually(partial(are_answered, goal))
                await api.kill()
                api.start()
        await eventually(lambda: mail_server.accepted)
        await eventually(lambda: len(subscriber.event_ids) == 2)
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    assert {answer.status_code for answer in answers} == {200}
    assert any(not isinstance(error, httpx.ConnectError) for error in errors), "no answer was lost"
    # The first answer may be among the lost ones.
    assert sum("Idempotent-Replayed" not in answer.headers for answer in answers) <= 1
    (uuid,) = {answer.json()["data"]["uuid"] for answer in answers}
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1
    assert subscriber.types(uuid) == {"request.created", "request.email_sent"}
    assert {event["subject"] for event in subscriber.received} == {uuid}
    assert len(mail_server.accepted) == 1
