"""Each number among the settings works at its bounds: libraries and protocols have bounds of their own."""

import msgspec
import pytest
from msgspec.inspect import FloatType, IntType, StructType, UnionType, type_info

from service.settings import ServiceSettings
from tests.end_to_end.callers import client_of, create
from tests.end_to_end.events import complete
from tests.harness.processes import api_process, started, worker_process
from worker.settings import EmailSettings

# Not at their bounds: the ports, and the time that the API goes on serving after SIGTERM.
_LEFT_OUT = {"PORT", "HEALTH_PORT", "SHUTDOWN_SECONDS"}


def at_bounds(kind: type[msgspec.Struct], bound: str) -> dict[str, str]:
    """Return the variables of *kind* that have such a bound, at this bound."""
    described = type_info(kind)
    assert isinstance(described, StructType)
    variables = {}
    for field in described.fields:
        types = field.type.types if isinstance(field.type, UnionType) else (field.type,)
        for each in types:
            if isinstance(each, IntType | FloatType) and (value := getattr(each, bound)) is not None:
                variables[field.encode_name] = str(value)
    return {name: value for name, value in variables.items() if name not in _LEFT_OUT}


@pytest.mark.parametrize("bound", ["ge", "le"])
async def test_request_is_completed_with_every_number_at_its_bound(
    bound, service_settings, worker_settings, issuer, channel, subscriber, tmp_path
):
    api = api_process(service_settings, tmp_path, **at_bounds(ServiceSettings, bound))
    worker = worker_process(worker_settings, tmp_path, **at_bounds(EmailSettings, bound))

    async with started(api, worker), client_of(api, issuer.token()) as caller:
        created = await create(caller)
        await complete(created["uuid"], channel, subscriber)
