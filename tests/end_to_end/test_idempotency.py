"""One key from many callers while the API is killed: one request, one event, one e-mail."""

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from tests.harness.examples import A_REQUEST
from tests.harness.processes import api_process, started
from tests.harness.waiting import eventually

_TIMES = 1000
_CALLERS = 64
_KILLS = 4
_PAUSE_SECONDS = 0.05  # while the API is down


class Calls:
    """The outcomes of the calls."""

    def __init__(self) -> None:
        self.answers: list[httpx.Response] = []
        self.lost = 0  # calls whose connection broke before the answer

    @property
    def made(self) -> int:
        """How many calls have ended."""
        return len(self.answers) + self.lost

    async def make(self, client: httpx.AsyncClient, turns: Iterator[int]) -> None:
        """Send the same request once for each of *turns*, which callers share."""
        for _ in turns:
            try:
                self.answers.append(await self._post(client))
            except httpx.TransportError:
                self.lost += 1

    async def have_been_made(self, count: int) -> None:
        """Wait until *count* calls have ended."""
        await eventually(lambda: self.made >= count)

    async def _post(self, client: httpx.AsyncClient) -> httpx.Response:
        while True:
            try:
                return await client.post("/v1/request", json=A_REQUEST)
            except httpx.ConnectError:
                await asyncio.sleep(_PAUSE_SECONDS)


@pytest.mark.long
async def test_request_sent_a_thousand_times_with_one_key_is_stored_and_mailed_once(
    *, service_settings, tmp_path, worker, issuer, database, subscriber, mail_server
):
    api = api_process(service_settings, tmp_path)
    calls = Calls()
    chance = random.Random(20)  # noqa: S311 - the same moments in every run
    turns = iter(range(_TIMES))
    client = httpx.AsyncClient(
        base_url=api.base_url,
        headers={"Authorization": f"Bearer {issuer.token()}", "Idempotency-Key": "case-17"},
        limits=httpx.Limits(max_connections=_CALLERS),
        timeout=30,
    )
    async with client, started(api, worker):
        async with asyncio.TaskGroup() as callers:
            for _ in range(_CALLERS):
                callers.create_task(calls.make(client, turns))
            for number in range(_KILLS):
                goal = number * _TIMES // (_KILLS + 1) + chance.randint(0, 50)
                await calls.have_been_made(goal)
                await api.kill()
                api.start()
        uuids = {answer.json()["data"]["uuid"] for answer in calls.answers if answer.is_success}
        await eventually(lambda: mail_server.accepted)
        await eventually(lambda: len(subscriber.event_ids) == 2)
        await eventually(lambda: database.fetchval("SELECT NOT EXISTS (SELECT FROM outbox)"))

    statuses = {answer.status_code for answer in calls.answers}
    firsts = [answer for answer in calls.answers if "Idempotent-Replayed" not in answer.headers]
    assert calls.made == _TIMES
    assert statuses == {200}
    assert calls.lost > 0
    assert len(firsts) <= 1  # the first answer may be among the lost ones
    (uuid,) = uuids
    assert await database.fetchval("SELECT count(*) FROM calculation_request") == 1
    assert subscriber.types(uuid) == {"request.created", "request.email_sent"}
    assert {event["subject"] for event in subscriber.received} == {uuid}
    assert len(mail_server.accepted) == 1
