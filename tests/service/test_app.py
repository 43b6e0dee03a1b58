"""The API as an application of Litestar: its own tools find it and serve it."""

from litestar.testing import AsyncTestClient

from service.app import create_app
from tests.harness.http import bearer


async def test_litestars_own_client_is_served(service_settings, issuer):
    async with AsyncTestClient(create_app(service_settings)) as client:
        response = await client.get("/v1/questionnaire/structure", headers=bearer(issuer.token()))

    assert response.status_code == 200
    assert response.json()["data"]["questionnaire"]
