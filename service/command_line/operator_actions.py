"""The record of what operators changed: who, when and why. Each change has a row, and a line in the log."""

from collections.abc import Collection
from uuid import UUID

from service.command_line.answering import Operator
from service.identifiers import uuid_of
from service.postgres.pool import Connection
from service.telemetry import logs


async def record(
    connection: Connection,
    action: str,
    changed: Collection[tuple[UUID | None, str | None]],
    by: Operator,
    *,
    conveyancer_id: str | None = None,
) -> None:
    """Record changes, each given as a request's id and what was changed, such as an e-mail key.

    The id is None if a conveyancer or very many requests were changed. Uses the caller's transaction, if any.
    The lines say what must be done again after a restore. They go to standard error before the commit, so a
    failure may leave a line without a change, but never a change without a line.
    """
    rows = [
        (request_id, conveyancer_id, action, subject, by.name, by.note) for request_id, subject in changed
    ]
    await connection.executemany(
        """
        INSERT INTO operator_action (request_id, conveyancer_id, action, subject, operator, note)
        VALUES ($1, $2, $3, $4, $5, $6)
        """,
        rows,
    )
    log = logs.to_standard_error().bind(
        action=action, conveyancer_id=conveyancer_id, operator=by.name, note=by.note
    )
    for request_id, subject in changed:
        log.info("operator_acted", uuid=request_id and uuid_of(request_id), subject=subject)
