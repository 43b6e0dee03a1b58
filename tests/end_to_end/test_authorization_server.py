"""A real authorization server, over HTTPS with a private authority: its tokens, and a rotation of its key."""

from typing import Any

import pytest

from tests.harness.authorization_server import AuthorizationServer
from tests.harness.examples import A_REQUEST, STRUCTURE
from tests.harness.http import bearer
from tests.harness.in_process import api_client
from tests.harness.waiting import eventually

pytestmark = pytest.mark.long


async def test_token_opens_what_its_scopes_allow_also_after_a_rotation_and_an_opaque_one_gets_401(
    authority, service_settings, tmp_path
):
    provider = AuthorizationServer(authority, tmp_path)
    async with provider.up(), api_client(await provider.settings(service_settings), None) as client:

        async def answers_to(token: str) -> list[Any]:
            client.headers.update(bearer(token))
            create = await client.post("/v1/request", json=A_REQUEST)
            return [create, await client.get("/v1/request"), await client.get(STRUCTURE)]

        reading, writing = [await provider.token(scope=f"request:{name}") for name in ("read", "write")]
        answers = [await answers_to(token) for token in (reading, writing)]
        opaque = await answers_to(await provider.token(is_opaque=True))
        await provider.rotate()
        client.headers.update(bearer(await provider.token()))
        await eventually(lambda: _is_accepted(client))

    assert [[each.status_code for each in three] for three in answers] == [[403, 200, 200], [200, 403, 200]]
    cause = "nor an opaque token: send an access token that is a JWT"
    assert all(each.status_code == 401 and cause in each.headers["WWW-Authenticate"] for each in opaque)


async def _is_accepted(client: Any) -> bool:
    response = await client.get("/v1/request")
    assert response.status_code in {200, 401, 503}  # See the table of errors: the API fetches the new key.
    return bool(response.is_success)
