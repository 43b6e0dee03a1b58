"""`schema apply`, where the schema is up to date."""

from service.postgres.schema import VERSION
from tests.harness.command_line import run
from tests.harness.processes import Ended


async def test_schema_that_is_there_already_is_said_to_be(environment):
    ended = await run("service", "schema", "apply", environment=environment)

    assert ended == Ended(0, f"schema version {VERSION} is there already\n", "")
