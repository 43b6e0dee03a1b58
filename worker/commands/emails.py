"""`emails list|resend|cancel`: the e-mails to customers, chosen by request, firm, reply and time."""

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, get_args
from uuid import UUID

import asyncpg
import click
import msgspec

from service.calculation_requests import conveyancers, email_changes, reading
from service.calculation_requests.changing import LockedRequest, change_all
from service.calculation_requests.email_changes import EmailId
from service.calculation_requests.model import AlreadyErased, AlreadyWithdrawn
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, on_record
from service.identifiers import uuid_of
from service.postgres.pool import Connection

State = Literal["pending", "sent", "failed"]

_BATCH = 200  # requests whose e-mails are changed in one transaction

emails = click.Group("emails", help="Show the e-mails to customers, send them again, and stop them.")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the e-mails that meet every condition, except conditions that are None."""

    request_id: UUID | None = None
    conveyancer_id: str | None = None
    reply: str | None = None  # the code or a part of the mail server's last reply
    since: parameters.Time | None = None  # for settled_at or, if the e-mail is pending, created_at

    def check_is_narrow(self) -> None:
        """Raise UsageError if all e-mails are chosen."""
        if self == Choice():
            raise click.UsageError("say which e-mails: --uuid, --conveyancer, --reply or --from")


def _choosing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose e-mails. The command gets them as *choice*."""

    @click.option("--uuid", "request_id", type=parameters.uuid, help="Only those of this request: req_…")
    @parameters.firm
    @click.option("--reply", type=parameters.line, help="Only those whose last reply has this code or text.")
    @parameters.since
    @functools.wraps(function)
    def callback(**arguments: Any) -> Any:  # noqa: ANN401 - click's
        choice = Choice(**{field: arguments.pop(field) for field in Choice.__struct_fields__})
        return function(choice=choice, **arguments)

    return callback


@emails.command("list")
@click.option("--state", type=click.Choice(get_args(State)), help="Default: all.")
@click.option("--unresolved", is_flag=True, help="Only failed e-mails with no later e-mail.")
@parameters.limit
@answering
@_choosing
async def list_emails(*, state: State | None, unresolved: bool, limit: int, choice: Choice) -> Answer:
    """Show e-mails, newest first, with the mail server's last replies."""
    if unresolved:
        state = "failed"
    async with connecting.postgres() as connection:
        found = await read(connection, choice, state=state, only_last=unresolved, limit=limit)
        if not found:
            await _check_exists(connection, choice)
    return Answer.listing(found)


@emails.command()
@click.option("--sent", is_flag=True, help="Include an e-mail that was sent. Needs --uuid.")
@click.option("--limit", type=parameters.COUNT, help="The most e-mails, the oldest first (default: all).")
@on_record
@_choosing
async def resend(*, sent: bool, limit: int | None, by: Operator, choice: Choice) -> Answer:
    """Send failed e-mails again, as new e-mails, unless their request has a later e-mail.

    Cancelled e-mails are sent again only with --uuid.
    """
    if sent and choice.request_id is None:
        raise click.UsageError("--sent needs --uuid: a sent e-mail is sent again for one request at a time")
    choice.check_is_narrow()
    async with connecting.postgres() as connection:
        newest_first = await read(connection, choice, state=None if sent else "failed", only_last=True)
        again = [
            EmailId(email["uuid"], email["number"] + 1, email["kind"])
            for email in reversed(newest_first)
            if choice.request_id is not None or email["reason"] != "cancelled"
        ][:limit]
        request_ids = [email.request_id for email in again]
        add = functools.partial(email_changes.add, connection, again)
        return await _change(connection, choice, request_ids, add, action="emails resend", by=by)


@emails.command()
@click.option("--resent", is_flag=True, help="Only e-mails that are not their request's first.")
@on_record
@_choosing
async def cancel(*, resent: bool, by: Operator, choice: Choice) -> Answer:
    """Cancel pending e-mails, even those not recorded yet. An e-mail that is being sent may still arrive."""
    choice.check_is_narrow()
    async with connecting.postgres() as connection:
        pending = await read(connection, choice, state="pending", with_expected=not resent)
        request_ids = [email["uuid"] for email in pending if email["number"] > 1 or not resent]
        cancel_all = functools.partial(email_changes.cancel, connection)
        return await _change(connection, choice, request_ids, cancel_all, action="emails cancel", by=by)


async def _change(
    connection: Connection,
    choice: Choice,
    request_ids: Sequence[UUID],
    write: Callable[[Mapping[UUID, LockedRequest]], Awaitable[Sequence[EmailId]]],
    *,
    action: str,
    by: Operator,
) -> Answer:
    """Change e-mails of these requests by *write*, which skips those that have changed since.

    Each transaction changes and records _BATCH requests. Returns how many were changed, or why none was.
    """
    changed = 0
    for start in range(0, len(request_ids), _BATCH):
        async with (
            connecting.bounded_transaction(connection),
            change_all(connection, request_ids[start : start + _BATCH]) as requests,
        ):
            written = await write(requests)
            changes = [(email.request_id, email.key) for email in written]
            await operator_actions.record(connection, action, changes, by)
        changed += len(written)
    if changed:
        return Answer({"emails": changed}, f"{changed} e-mails changed")
    why = await _why_none(connection, choice)
    return Answer({"emails": 0}, f"0 e-mails changed: none meets all conditions. {why}", status=1)


async def _why_none(connection: Connection, choice: Choice) -> str:
    """Return why a command changed no e-mail. Raises the error of the request or firm that *choice* names."""
    await _check_exists(connection, choice)
    if choice.request_id is None:
        return "`python -m worker emails list` shows which e-mails there are."
    withdrawn = "SELECT withdrawn_at IS NOT NULL FROM calculation_request WHERE id = $1"
    is_withdrawn = await connection.fetchval(withdrawn, choice.request_id)
    if is_withdrawn is not False:  # None: it exists no longer.
        raise AlreadyWithdrawn if is_withdrawn else AlreadyErased
    last, *_ = await read(connection, Choice(request_id=choice.request_id), with_expected=True, limit=1)
    return f"Its last e-mail, number {last['number']}, {_LAST[last['state']].format(uuid_of(last['uuid']))}"


_LAST = {
    "pending": "is pending: `python -m worker trace {}` shows when it is sent.",
    "sent": "was sent: `python -m worker emails resend --uuid {} --sent` sends it again.",
    "failed": "failed: `python -m worker emails resend --uuid {}` sends it again.",
}


async def _check_exists(connection: Connection, choice: Choice) -> None:
    """Raise RequestNotFound or UnknownConveyancer if *choice* names what does not exist."""
    if choice.request_id is not None:
        await reading.check_known(connection, choice.request_id)
    if choice.conveyancer_id is not None:
        await conveyancers.check_registered(connection, choice.conveyancer_id)


async def read(
    connection: Connection,
    choice: Choice,
    *,
    state: State | None = None,
    only_last: bool = False,
    with_expected: bool = False,
    limit: int | None = None,
) -> list[asyncpg.Record]:
    """Return the newest of the chosen e-mails, newest first, without addresses in the mail server's reply.

    *only_last* leaves out e-mails that another one has followed, and those of withdrawn or erased requests.
    *with_expected* adds, as pending, first e-mails that no consumer has recorded yet.
    """
    choice = msgspec.structs.replace(choice, since=await parameters.at(connection, choice.since))
    conditions = (*msgspec.structs.astuple(choice), state, only_last)
    return await connection.fetch(_READ, *conditions, limit, with_expected)


_READ = r"""
    SELECT request_id AS uuid, number, kind,
           (SELECT conveyancer_id
              FROM event
             WHERE request_id = email.request_id
               AND sequence = 1) AS conveyancer,
           requested_by, state, reason, attempts,
           regexp_replace(server_reply, '[^\s<>@]+@[^\s<>@]+', '[address]', 'g') AS server_reply,
           created_at, settled_at, CASE WHEN state = 'pending' THEN next_attempt_at END AS next_attempt_at,
           count(*) OVER () AS total
      FROM (SELECT request_id, number, kind, requested_by, state, reason, attempts, server_reply, smtp_code,
                   created_at, settled_at, next_attempt_at
              FROM email
             UNION ALL
            SELECT id, 1, 'invitation', NULL, 'pending', NULL, 0, NULL, NULL, created_at, NULL, NULL
              FROM calculation_request AS request
             WHERE $8
               AND NOT EXISTS (SELECT FROM email WHERE request_id = request.id)) AS email
     WHERE ($1::uuid IS NULL OR request_id = $1)
       AND ($2::text IS NULL OR request_id IN (SELECT id FROM calculation_request WHERE conveyancer_id = $2))
       AND ($3::text IS NULL OR strpos(concat_ws(' ', smtp_code, server_reply), $3) > 0)
       AND ($4::timestamptz IS NULL OR coalesce(settled_at, created_at) >= $4)
       AND ($5::text IS NULL OR state = $5)
       AND (NOT $6
            OR (EXISTS (SELECT
                          FROM calculation_request AS request
                         WHERE request.id = email.request_id
                           AND request.withdrawn_at IS NULL)
                AND NOT EXISTS (SELECT
                                  FROM email AS later
                                 WHERE later.request_id = email.request_id
                                   AND later.number > email.number)))
     ORDER BY created_at DESC, request_id DESC, number DESC
     LIMIT $7
"""
