"""How long a verified access token is trusted without another look at the issuer's keys."""

import time
from collections.abc import AsyncIterator

import msgspec
import pytest

from service.authentication.api_keys import ApiKeyUses
from service.authentication.authenticator import READ, Authenticator, InvalidCredentials
from service.authentication.signing_keys import SigningKeys, open_signing_keys
from service.postgres.pool import open_pool
from service.settings import ServiceSettings
from tests.harness.issuer import Issuer

LONGEST_SECONDS = 300  # as the table of settings says


class Clock:
    """The time, which the test can move."""

    def __init__(self) -> None:
        self.passed_seconds = 0.0

    def __call__(self) -> float:
        """Return the time in seconds since the epoch."""
        return time.time() + self.passed_seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def signing_keys(service_settings: ServiceSettings, own_issuer: Issuer) -> SigningKeys:
    """The keys of an issuer that can withdraw them."""
    settings = msgspec.structs.replace(service_settings, auth_jwks_url=own_issuer.jwks.as_uri())
    return open_signing_keys(settings)


@pytest.fixture
async def authenticator(
    service_settings: ServiceSettings, signing_keys: SigningKeys, clock: Clock
) -> AsyncIterator[Authenticator]:
    """An authenticator whose memory has its own clock."""
    async with open_pool(service_settings) as pool:
        uses = ApiKeyUses(pool, interval_seconds=60.0, timeout_seconds=1.0)
        yield Authenticator(service_settings, signing_keys, pool, uses, clock=clock)


async def verify(authenticator: Authenticator, token: str) -> None:
    await authenticator.verify_access_token(token, scope=READ)


async def test_token_is_trusted_for_five_minutes_after_its_key_is_withdrawn_and_no_longer(
    authenticator: Authenticator, signing_keys: SigningKeys, own_issuer: Issuer, clock: Clock
) -> None:
    remembered, new = own_issuer.token(), own_issuer.token(jti="never seen before")
    await verify(authenticator, remembered)
    own_issuer.publish("next")  # and the key "local" no more
    await signing_keys.refresh()

    with pytest.raises(InvalidCredentials):
        await verify(authenticator, new)
    clock.passed_seconds = LONGEST_SECONDS - 60
    await verify(authenticator, remembered)
    clock.passed_seconds = LONGEST_SECONDS + 1
    with pytest.raises(InvalidCredentials):
        await verify(authenticator, remembered)


async def test_use_does_not_prolong_the_time_for_which_a_token_is_trusted(
    authenticator: Authenticator, signing_keys: SigningKeys, own_issuer: Issuer, clock: Clock
) -> None:
    token = own_issuer.token()
    await verify(authenticator, token)
    own_issuer.publish("next")
    await signing_keys.refresh()

    for share in (1 / 3, 2 / 3):
        clock.passed_seconds = share * LONGEST_SECONDS
        await verify(authenticator, token)
    clock.passed_seconds = LONGEST_SECONDS + 1
    with pytest.raises(InvalidCredentials):
        await verify(authenticator, token)
