"""`request erase`: deletes the personal data of a request."""

import argparse
import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from uuid import UUID

import msgspec

from service.calculation_requests import erased
from service.calculation_requests.model import RequestNotFound
from service.identifiers import uuid_of
from service.operations import erasing, operator_actions, operator_arguments
from service.operations.operator_actions import Operator
from service.outbox import lanes
from service.postgres import loans
from service.postgres.pool import Connection
from worker.operating import arguments, connections
from worker.operating.answers import Answer, OperatorError
from worker.operating.arguments import Subcommands, add_command, add_group
from worker.relay.lanes import lock_lanes

LANE_SECONDS = 30.0  # to wait for a lane: longer than a relay may hold it
_LANE_POLL_SECONDS = 0.02


class LaneBusy(OperatorError):
    """A relay holds the lane of these events: try again."""


class Erasure(msgspec.Struct, frozen=True):
    """What a command erased."""

    uuid: str
    was_erased_before: bool


def add_to(commands: Subcommands) -> None:
    """Add the command to the parser."""
    group = add_group(commands, "request", "Erase a request.")
    command = add_command(group, "erase", erase)
    command.set_defaults(lane_seconds=LANE_SECONDS)
    command.add_argument("uuid", type=arguments.request_id, help="req_…")
    operator_arguments.add_arguments(command)


async def erase(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Delete a request for good."""
    by = operator_arguments.operator(options)
    async with connections.postgres(environment) as connection:
        is_new = await _erase(connection, options.uuid, by, lane_seconds=options.lane_seconds)
    erasure = Erasure(uuid_of(options.uuid), was_erased_before=not is_new)
    return Answer(erasure, f"{erasure.uuid} {'erased' if is_new else 'had been erased'}")


async def _erase(connection: Connection, request_id: UUID, by: Operator, *, lane_seconds: float) -> bool:
    """Erase a request in Postgres, and record it. False if it had been erased. Raises RequestNotFound."""
    async with locked_lane(connection, lanes.lane_of(request_id), lane_seconds):
        if await erasing.erase(connection, [request_id]):
            await operator_actions.record(connection, "request erase", [(request_id, None)], by)
            is_new = True
        elif await erased.among(connection, [request_id]):
            is_new = False
        else:
            raise RequestNotFound
    await lanes.notify(connection)
    return is_new


@asynccontextmanager
async def locked_lane(connection: Connection, lane: int, seconds: float) -> AsyncIterator[None]:
    """Hold a lane as a relay does, whose pass relies on the rows it has read.

    Raises LaneBusy when a relay still holds it after *seconds*. Postgres frees the lane when this process
    vanishes: TCP would keep it locked for two hours.
    """
    for _ in range(int(seconds / _LANE_POLL_SECONDS)):
        async with loans.bounded_transaction(connection):
            if (await lock_lanes(connection, [lane])).lanes:
                yield
                return
        await asyncio.sleep(_LANE_POLL_SECONDS)
    raise LaneBusy
