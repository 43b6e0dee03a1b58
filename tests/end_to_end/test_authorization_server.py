"""A real authorization server, over HTTPS with a private authority: its tokens, a rotation, an outage."""

import asyncio
import time
from collections import Counter
from functools import partial
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
_ENOUGH = 100  # calls that must be accepted with a new key
_LONGEST_SECONDS = 8.0  # A second until the next fetch, 5 s at most for it, and two for a busy machine.

Answer = tuple[int, str | None, str | None]  # the status, the error's message, and Retry-After
ACCEPTED: Answer = (200, None, None)
UNAVAILABLE: Answer = (
    503,
    "The access token cannot be verified now: keep it, and try again after the time in Retry-After.",
    "1",
)
NOT_PUBLISHED: Answer = (
    401,
    "The issuer does not publish the access token's key for signatures.",
    None,
)


class Calls:
    """Creates with new tokens, one after another, by a program that follows the table of errors."""

    def __init__(self, api: Process, provider: AuthorizationServer) -> None:
        self.is_over = False
        self.answers: Counter[tuple[str, Answer]] = Counter()  # by the key of the token
        self.longest_seconds = 0.0  # until a call was accepted, or given up
        self._api, self._provider = api, provider

    async def run(self) -> None:
        """Call until it is over."""
        async with client_of(self._api, "none yet") as client:
            while not self.is_over:
                seconds = await self._call(client)
                self.longest_seconds = max(self.longest_seconds, seconds)

    async def _call(self, client: httpx.AsyncClient) -> float:
        began, body, key = time.monotonic(), another_request(), uuid4().hex
        token = await self._provider.token()
        while True:
            headers = bearer(token) | {"Idempotency-Key": key}
            answer = answer_of(await client.post("/v1/request", json=body, headers=headers))
            self.answers[key_of(token), answer] += 1
            seconds = time.monotonic() - began
            if answer == ACCEPTED or seconds > _LONGEST_SECONDS:
                return seconds
            if answer[2]:
                await asyncio.sleep(int(answer[2]))
            else:
                token = await self._provider.token()

    def breaches(self) -> list[str]:
        """Return what deploy/reference.md does not promise."""
        promised = {ACCEPTED, UNAVAILABLE, NOT_PUBLISHED}
        found = [f"answered {answer}" for _, answer in self.answers if answer not in promised]
        return [*found, "refused for too long"] if self.longest_seconds > _LONGEST_SECONDS else found


def answer_of(response: httpx.Response) -> Answer:
    errors = response.json()["errors"]
    return response.status_code, errors and errors[0]["message"], response.headers.get("Retry-After")


def key_of(token: str) -> str:
    return jwt.get_unverified_header(token)["kid"]


@pytest.fixture
async def provider(authority, tmp_path):
    server = AuthorizationServer(authority, tmp_path)
    async with server.up():
        yield server


@pytest.fixture
async def api_with(service_settings, provider, tmp_path):
    """Makes an API that expects tokens of the provider, not yet started."""
    settings = await provider.settings(service_settings)
    return partial(api_process, settings, tmp_path, SHUTDOWN_SECONDS="5")


@pytest.fixture
def trust(authority):
    """What components/trust sets for the connection to the provider."""
    return {"SSL_CERT_FILE": str(authority.file)}


async def test_rotation_without_overlap_refuses_calls_for_about_a_second_as_promised(
    provider, api_with, trust
):
    """An API that fetches the keys only once is beside ours, and the same check finds it."""
    apis = api_with(**trust), api_with(**trust, broken="fetches-keys-once")
    ours, broken = (Calls(api, provider) for api in apis)
    used, unused = await provider.token(), await provider.token()
    async with (
        started(*apis),
        client_of(apis[0], used) as client,
        httpx.AsyncClient(base_url=apis[0].probes_url) as probes,
        asyncio.TaskGroup() as group,
    ):
        assert (await client.get("/v1/request")).status_code == 200
        for calls in [ours] * _CALLERS + [broken]:
            group.create_task(calls.run())
        await eventually(lambda: keys_are_old(probes))
        to_new_tokens = await rotate(provider, ours)
        await rotate(provider, ours)  # soon after a fetch, so new tokens may get 401
        ours.is_over = broken.is_over = True
        answers = [await client.get("/v1/request", headers=bearer(token)) for token in (used, unused)]

    assert ours.breaches() == []
    assert to_new_tokens == {ACCEPTED, UNAVAILABLE}
    assert [*map(answer_of, answers)] == [ACCEPTED, NOT_PUBLISHED], (
        "a verified token is trusted for 5 minutes"
    )
    assert broken.breaches() == ["refused for too long"]


async def rotate(provider: AuthorizationServer, calls: Calls) -> set[Answer]:
    """Replace the key. Return the answers to tokens with the new one, once enough of them are accepted."""
    await provider.rotate()
    key_id = key_of(await provider.token())
    await eventually(lambda: calls.answers[key_id, ACCEPTED] >= _ENOUGH)
    return {answer for key, answer in calls.answers if key == key_id}


async def keys_are_old(probes: httpx.AsyncClient) -> bool:
    """Whether the last fetch is so long ago that an unknown key gets 503."""
    return (await scrape(probes))[series("jwks_age_seconds")] >= 10


async def test_outage_of_the_issuer_leaves_known_keys_in_use_and_ends_by_itself(provider, api_with, trust):
    api, late, distrusting = api_with(**trust), api_with(**trust), api_with()
    tokens = [await provider.token() for _ in range(3)]
    async with started(api):
        assert await ask(api, tokens[0]) == ACCEPTED
        await provider.process.kill()
        async with started(late, distrusting):
            known, unknown = [[await ask(each, token) for token in tokens] for each in (api, late)]
            provider.process.start()
            await eventually(lambda: is_accepted(late, tokens[1]))
            without_authority = await ask(distrusting, tokens[1])

    assert known == [ACCEPTED] * 3
    assert unknown == [UNAVAILABLE] * 3
    assert without_authority == UNAVAILABLE


async def ask(api: Process, token: str) -> Answer:
    async with client_of(api, token) as client:
        return answer_of(await client.get("/v1/request"))


async def is_accepted(api: Process, token: str) -> bool:
    return await ask(api, token) == ACCEPTED


async def test_token_opens_what_its_scopes_allow_and_an_opaque_one_gets_401_with_the_cause(
    provider, api_with, trust
):
    api = api_with(**trust)
    reading, writing = [await provider.token(scope=f"request:{name}") for name in ("read", "write")]
    opaque = await provider.token(is_opaque=True)
    answers = {}
    async with started(api), client_of(api, "none yet") as client:
        for token in (reading, writing, opaque):
            client.headers.update(bearer(token))
            create = await client.post("/v1/request", json=A_REQUEST)
            answers[token] = [create, await client.get("/v1/request"), await client.get(STRUCTURE)]

    statuses = {token: [each.status_code for each in three] for token, three in answers.items()}
    assert statuses == {reading: [403, 200, 200], writing: [200, 403, 200], opaque: [401] * 3}
    cause = "nor an opaque token: send an access token that is a JWT"
    assert all(cause in each.headers["WWW-Authenticate"] for each in answers[opaque])
