"""The API as an application of Litestar: its own tools find it and serve it."""

import sys

from litestar.testing import AsyncTestClient

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.processes import run_command
from service.app import create_app
from tests.harness.http import bearer
from tests.harness.processes import environment_of


async def test_litestars_own_client_is_served(service_settings, issuer):
    async with AsyncTestClient(create_app(service_settings)) as client:
        response = await client.get("/v1/questionnaire/structure", headers=bearer(issuer.token()))

    assert response.status_code == 200
    assert response.json()["data"]["questionnaire"]


def test_litestars_command_line_lists_the_routes(service_settings):
    command = [sys.executable, "-m", "litestar", "--app", "service.app:create_app", "routes"]
    environment = environment_of(service_settings, COLUMNS="200")
    listed = run_command("litestar", command, folder=CHECKOUT, seconds=60.0, environment=environment)

    for path in ("/v1/request", "/v1/request/{uuid:str}/events", "/v1/questionnaire/structure"):
        assert path in listed
