"""A real authorization server, over HTTPS with a private authority: its tokens, a rotation, an outage."""

import asyncio
import math
import time
from collections import Counter
from typing import NamedTuple
from uuid import uuid4

import httpx
import jwt
import pytest

from tests.end_to_end.callers import another_request, client_of
from tests.harness.authorization_server import AuthorizationServer
from tests.harness.examples import A_REQUEST, STRUCTURE
from tests.harness.http import bearer
from tests.harness.metrics import scrape, series
from tests.harness.processes import Process, api_process, started
from tests.harness.waiting import eventually

pytestmark = pytest.mark.long

_CALLERS = 8
_ENOUGH = 100  # calls that must be accepted with a key
_LONGEST_SECONDS = 8.0  # A second until the next fetch, 5 s at most for it, and two for a busy machine.


class Answer(NamedTuple):
    """What counts of an answer."""

    status: int
    message: str | None = None
    retry_after: str | None = None


ACCEPTED = Answer(200)
UNAVAILABLE = Answer(
    503, "The access token cannot be verified now: keep it, and try again after the time in Retry-After.", "1"
)
NOT_PUBLISHED = Answer(401, "The access token is signed with a key that the issuer does not publish.")


def answer_of(response: httpx.Response) -> Answer:
    errors = response.json()["errors"]
    message = errors[0]["message"] if errors else None
    return Answer(response.status_code, message, response.headers.get("Retry-After"))


def key_of(token: str) -> str:
    key_id: str = jwt.get_unverified_header(token)["kid"]
    return key_id


class Calls:
    """Creates with new tokens, one after another, as a program sends them that heeds the error table."""

    def __init__(self, api: Process, provider: AuthorizationServer) -> None:
        self.is_over = False
        self.answers: Counter[tuple[str, Answer]] = Counter()  # by the key of the token
        self.longest_refusal = 0.0  # seconds from a call's first answer to its acceptance
        self._api, self._provider = api, provider

    async def run(self) -> None:
        """Call until it is over."""
        async with client_of(self._api, "none yet") as client:
            while not self.is_over:
                refused_for = await self._call(client)
                self.longest_refusal = max(self.longest_refusal, refused_for)

    async def _call(self, client: httpx.AsyncClient) -> float:
        token, key, body = await self._provider.token(), uuid4().hex, another_request()
        first = math.inf
        while True:
            headers = bearer(token) | {"Idempotency-Key": key}
            response = await client.post("/v1/request", json=body, headers=headers)
            first = min(first, time.monotonic())
            answer = answer_of(response)
            self.answers[key_of(token), answer] += 1
            refused_for = time.monotonic() - first
            if answer == ACCEPTED or refused_for > _LONGEST_SECONDS:
                return refused_for
            if answer.retry_after:
                await asyncio.sleep(int(answer.retry_after))
            else:
                token = await self._provider.token()

    def breaches(self) -> list[str]:
        """Return what service/README.md does not promise."""
        promised = {ACCEPTED, UNAVAILABLE, NOT_PUBLISHED}
        found = [f"answered {answer}" for _, answer in self.answers if answer not in promised]
        if self.longest_refusal > _LONGEST_SECONDS:
            found.append("refused for too long")
        return found


@pytest.fixture
async def provider(authority, tmp_path):
    server = AuthorizationServer(authority, tmp_path)
    async with server.up():
        yield server


@pytest.fixture
async def settings(service_settings, provider):
    return await provider.settings(service_settings)


@pytest.fixture
def variables(authority):
    """Let an API trust the authority, as components/trust does, and end within five seconds."""
    return {"SSL_CERT_FILE": str(authority.file), "SHUTDOWN_SECONDS": "5"}


async def test_rotation_without_overlap_refuses_calls_for_about_a_second_as_promised(
    settings, provider, variables, tmp_path
):
    """An API that fetches the keys only once is beside ours, and the same check finds it."""
    apis = [api_process(settings, tmp_path, broken=each, **variables) for each in (None, "fetches-keys-once")]
    ours, broken = (Calls(api, provider) for api in apis)
    used, unused = await provider.token(), await provider.token()
    async with started(*apis), client_of(apis[0], used) as client, asyncio.TaskGroup() as group:
        assert (await client.get("/v1/request")).status_code == 200
        for calls in [ours] * _CALLERS + [broken]:
            group.create_task(calls.run())
        await eventually(lambda: keys_are_old(client))
        for_new_tokens = await rotate(provider, ours)
        await rotate(provider, ours)  # soon after a fetch, so new tokens may get 401
        ours.is_over = broken.is_over = True
        answers = [await client.get("/v1/request", headers=bearer(token)) for token in (used, unused)]

    assert ours.breaches() == []
    assert for_new_tokens == {ACCEPTED, UNAVAILABLE}
    assert answer_of(answers[0]) == ACCEPTED, "a verified token is trusted for 5 minutes"
    assert answer_of(answers[1]) == NOT_PUBLISHED
    assert broken.breaches() == ["refused for too long"]


async def rotate(provider: AuthorizationServer, calls: Calls) -> set[Answer]:
    """Replace the key. Return the answers to tokens with the new one, once enough of them are accepted."""
    await provider.rotate()
    key_id = key_of(await provider.token())
    await eventually(lambda: calls.answers[key_id, ACCEPTED] >= _ENOUGH)
    return {answer for key, answer in calls.answers if key == key_id}


async def keys_are_old(client: httpx.AsyncClient) -> bool:
    """Whether the last fetch is so long ago that an unknown key gets 503."""
    return (await scrape(client))[series("jwks_age_seconds")] >= 10


async def test_outage_of_the_issuer_leaves_known_keys_in_use_and_ends_by_itself(
    settings, provider, variables, tmp_path
):
    api, late = (api_process(settings, tmp_path, **variables) for _ in range(2))
    without_authority = api_process(settings, tmp_path, SHUTDOWN_SECONDS="5")
    tokens = [await provider.token() for _ in range(3)]
    async with started(api):
        assert await ask(api, tokens[0]) == ACCEPTED
        await provider.process.kill()
        async with started(late, without_authority):
            known, unknown = [[await ask(each, token) for token in tokens] for each in (api, late)]
            provider.process.start()
            await eventually(lambda: is_accepted(late, tokens[1]))
            distrusting = await ask(without_authority, tokens[1])

    assert known == [ACCEPTED] * 3
    assert unknown == [UNAVAILABLE] * 3
    assert distrusting == UNAVAILABLE


async def ask(api: Process, token: str) -> Answer:
    async with client_of(api, token) as client:
        return answer_of(await client.get("/v1/request"))


async def is_accepted(api: Process, token: str) -> bool:
    return await ask(api, token) == ACCEPTED


async def test_token_opens_what_its_scopes_allow_and_an_opaque_one_gets_401_with_the_cause(
    settings, provider, variables, tmp_path
):
    api = api_process(settings, tmp_path, **variables)
    reading, writing = [await provider.token(scope=f"request:{name}") for name in ("read", "write")]
    opaque = await provider.token(is_opaque=True)
    statuses = {}
    async with started(api):
        for token in (reading, writing, opaque):
            async with client_of(api, token) as client:
                responses = [
                    await client.post("/v1/request", json=A_REQUEST),
                    await client.get("/v1/request"),
                    await client.get(STRUCTURE),
                ]
                statuses[token] = [response.status_code for response in responses]

    assert statuses == {reading: [403, 200, 200], writing: [200, 403, 200], opaque: [401] * 3}
    for response in responses:
        assert (
            "nor an opaque token: send an access token that is a JWT" in response.headers["WWW-Authenticate"]
        )
