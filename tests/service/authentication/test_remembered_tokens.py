"""How long a verified access token is trusted without another look at the issuer's keys."""

import pytest

from service.authentication import authenticator
from service.authentication.authenticator import READ, Authenticator, InvalidCredentials
from service.authentication.signing_keys import SigningKeys
from service.postgres.pool import open_pool
from service.settings import ServiceSettings
from tests.harness.issuer import Issuer
from tests.harness.waiting import eventually


async def test_token_is_trusted_for_a_while_after_its_key_is_withdrawn_and_use_does_not_prolong_it(
    service_settings: ServiceSettings, own_issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(authenticator, "_LONGEST_CACHED_SECONDS", 1.0)
    keys = SigningKeys(own_issuer.jwks.as_uri())
    remembered, new = own_issuer.token(), own_issuer.token(jti="never seen before")
    async with open_pool(service_settings) as pool:
        verifier = Authenticator(service_settings, keys, pool)

        async def is_refused(token: str) -> bool:
            try:
                await verifier.verify_access_token(token, scope=READ)
            except InvalidCredentials:
                return True
            return False

        assert not await is_refused(remembered)
        own_issuer.publish("next")  # and the key "local" no more
        await keys.refresh()

        assert await is_refused(new)
        assert not await is_refused(remembered)
        await eventually(lambda: is_refused(remembered))
