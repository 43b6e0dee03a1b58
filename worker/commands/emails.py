"""`emails list|resend|cancel`: the e-mails to customers, chosen by request, firm, reply and time."""

import functools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, get_args
from uuid import UUID

import click
import msgspec

from service.calculation_requests import email_changes
from service.calculation_requests.changing import LockedRequest, change_all
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, answering, on_record, progress
from service.command_line.operator_actions import Operator
from service.postgres import connections
from service.postgres.pool import Connection

State = Literal["pending", "sent", "failed"]

_ADDRESS = re.compile(r"[^\s<>@]+@[^\s<>@]+")
_BATCH = 200  # e-mails that are changed in one transaction


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses the e-mails that meet every condition, except conditions that are None."""

    request_id: UUID | None = None
    conveyancer_id: str | None = None
    smtp_code: int | None = None  # of the mail server's last reply
    reply: str | None = None  # a part of the mail server's last reply
    since: datetime | None = None  # for settled_at or, if the e-mail is pending, created_at
    until: datetime | None = None  # likewise

    def check_is_narrow(self) -> None:
        """Raise UsageError unless a field besides *until* narrows the choice."""
        if self == Choice(until=self.until):
            raise click.UsageError("say which e-mails: --uuid, --conveyancer, --code, --reply or --from")


class LedgerEmail(msgspec.Struct, frozen=True, kw_only=True):
    """An e-mail to a customer. Addresses are removed from the mail server's reply."""

    key: str
    state: State
    reason: str | None
    attempts: int
    server_reply: str | None
    created_at: datetime
    settled_at: datetime | None
    next_attempt_at: datetime | None


Found = Sequence[tuple[str, UUID]]  # each e-mail's key, and the id of its request
_Write = Callable[[Connection, Sequence[str], Mapping[UUID, LockedRequest]], Awaitable[Mapping[UUID, str]]]


def _choosing(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose e-mails. The command gets them as *choice*."""

    @click.option("--uuid", "request_id", type=parameters.uuid, help="Only those of this request: req_…")
    @click.option(
        "--conveyancer", "conveyancer_id", metavar="ID", type=parameters.line, help="Only this firm's."
    )
    @click.option(
        "--code", "smtp_code", type=parameters.SMTP_REFUSAL, help="Only those with this last reply code."
    )
    @click.option("--reply", type=parameters.line, help="Only those whose last reply has this text.")
    @click.option(
        "--from",
        "since",
        type=parameters.time,
        metavar="TIME",
        help="Only those sent, failed or (if pending) added since TIME: ISO 8601, or 2h for two hours ago.",
    )
    @click.option("--to", "until", type=parameters.time, metavar="TIME", help="Before TIME. Default: now.")
    @functools.wraps(function)
    def callback(**arguments: Any) -> Any:  # noqa: ANN401 - click's
        choice = Choice(**{field: arguments.pop(field) for field in Choice.__struct_fields__})
        return function(choice=choice, **arguments)

    return callback


@click.command("list")
@click.option("--state", type=click.Choice(get_args(State)), help="Default: all.")
@click.option("--unresolved", is_flag=True, help="Only failed e-mails with no later e-mail.")
@click.option(
    "--limit", type=parameters.COUNT, default=50, show_default=True, help="The most e-mails to show."
)
@answering
@_choosing
async def list_emails(*, state: State | None, unresolved: bool, limit: int, choice: Choice) -> Answer:
    """Show e-mails, newest first, with the mail server's last replies."""
    async with connecting.postgres() as connection:
        found = await read(connection, choice, state=state, unresolved=unresolved, limit=limit)
    return Answer.listing(found)


@click.command
@click.option("--sent", is_flag=True, help="Include an e-mail that was sent. Needs --uuid.")
@click.option("--limit", type=parameters.COUNT, help="The most e-mails, the oldest first (default: all).")
@click.option("--dry-run", is_flag=True, help="Count the e-mails, write nothing.")
@answering
@on_record
@_choosing
async def resend(*, sent: bool, limit: int | None, dry_run: bool, by: Operator, choice: Choice) -> Answer:
    """Send failed e-mails again, as new e-mails, unless their request has a later e-mail.

    E-mails that operators cancelled are sent again only with --uuid.
    """
    if sent and choice.request_id is None:
        raise click.UsageError("--sent needs --uuid: a sent e-mail is sent again for one request at a time")
    choice.check_is_narrow()

    async with connecting.postgres() as connection:
        found = await _find_ended(connection, choice, states=["failed", "sent"] if sent else ["failed"])
        found = found[:limit]
        add_again = email_changes.add_again
        return await _change(connection, found, add_again, action="emails resend", by=by, dry_run=dry_run)


@click.command
@click.option("--resent", is_flag=True, help="Only e-mails that are not their request's first.")
@click.option("--dry-run", is_flag=True, help="Count the e-mails, write nothing.")
@answering
@on_record
@_choosing
async def cancel(*, resent: bool, dry_run: bool, by: Operator, choice: Choice) -> Answer:
    """Cancel pending e-mails, even those not recorded yet. An e-mail that is being sent may still arrive."""
    choice.check_is_narrow()

    async with connecting.postgres() as connection:
        found = await _find_unsent(connection, choice)
        if resent:
            found = [each for each in found if each[0] != email_changes.first_email_key(each[1])]
        return await _change(
            connection,
            found,
            lambda own, _, requests: email_changes.cancel(own, requests),
            action="emails cancel",
            by=by,
            dry_run=dry_run,
        )


emails = click.Group(
    "emails",
    help="Show the e-mails to customers, send them again, and stop them.",
    commands=[list_emails, resend, cancel],
)


async def _change(
    connection: Connection,
    found: Found,
    write: _Write,
    *,
    action: str,
    by: Operator,
    dry_run: bool,
) -> Answer:
    """Change e-mails in batches. One transaction changes a batch and records the change.

    Returns how many e-mails were changed. *write* skips e-mails that have changed since they were found.
    """
    if dry_run:
        return Answer({"emails": len(found)}, f"{len(found)} e-mails would be changed")
    changed = 0
    with progress(action, len(found)) as advance:
        for start in range(0, len(found), _BATCH):
            batch = found[start : start + _BATCH]
            request_ids = {request_id for _, request_id in batch}
            async with (
                connections.bounded_transaction(connection),
                change_all(connection, request_ids) as requests,
            ):
                written = await write(connection, [key for key, _ in batch], requests)
                await operator_actions.record(connection, action, written.items(), by)
            changed += len(written)
            advance(len(batch))
    return Answer({"emails": changed}, f"{changed} e-mails changed")


async def read(
    connection: Connection,
    choice: Choice,
    *,
    state: State | None = None,
    unresolved: bool = False,
    limit: int,
) -> list[LedgerEmail]:
    """Return the newest of the chosen e-mails, newest first."""
    rows = await connection.fetch(
        f"""
        SELECT email_key AS key, state, reason, attempts, server_reply, created_at, settled_at,
               CASE WHEN state = 'pending' THEN next_attempt_at END AS next_attempt_at
          FROM email
         WHERE {_CHOSEN}
           AND ($7::text IS NULL OR state = $7)
           AND NOT ($8 AND (state <> 'failed' OR NOT {_LAST}))
         ORDER BY created_at DESC, email_key DESC
         LIMIT $9
        """,  # noqa: S608 - constants only
        *msgspec.structs.astuple(choice),
        state,
        unresolved,
        limit,
    )
    return [_without_addresses(LedgerEmail(**row)) for row in rows]


def _without_addresses(email: LedgerEmail) -> LedgerEmail:
    reply = email.server_reply
    return msgspec.structs.replace(email, server_reply=reply and _ADDRESS.sub("[address]", reply))


async def _find_ended(connection: Connection, choice: Choice, *, states: Sequence[State]) -> Found:
    """Return the chosen e-mails in one of *states*, if their request has no later e-mail.

    E-mails of erased requests are left out. So are cancelled e-mails, unless *choice* names their request.
    """
    rows = await connection.fetch(
        f"""
        SELECT email_key, request_id
          FROM email
         WHERE {_CHOSEN}
           AND state = ANY($7)
           AND ($1::uuid IS NOT NULL OR reason IS DISTINCT FROM 'cancelled')
           AND {_LAST}
         ORDER BY email_key
        """,  # noqa: S608 - constants only
        *msgspec.structs.astuple(choice),
        states,
    )
    return [(row["email_key"], row["request_id"]) for row in rows]


async def _find_unsent(connection: Connection, choice: Choice) -> Found:
    """Return the chosen e-mails that are pending, even if they are not recorded yet.

    An e-mail that is not recorded yet is chosen by the uuid, firm and created_at of its request.
    """
    rows = await connection.fetch(
        f"""
        SELECT email_key, request_id
          FROM email
         WHERE {_CHOSEN}
           AND state = 'pending'
        UNION ALL
        SELECT NULL, id
          FROM calculation_request AS request
         WHERE ($1::uuid IS NULL OR id = $1)
           AND ($2::text IS NULL OR conveyancer_id = $2)
           AND $3::integer IS NULL
           AND $4::text IS NULL
           AND ($5::timestamptz IS NULL OR created_at >= $5)
           AND ($6::timestamptz IS NULL OR created_at < $6)
           AND NOT EXISTS (SELECT
                             FROM email
                            WHERE email.request_id = request.id)
         ORDER BY request_id
        """,  # noqa: S608 - constants only
        *msgspec.structs.astuple(choice),
    )
    return [(found or email_changes.first_email_key(request_id), request_id) for found, request_id in rows]


_CHOSEN = """($1::uuid IS NULL OR request_id = $1)
           AND ($2::text IS NULL OR request_id IN (SELECT id
                                                     FROM calculation_request
                                                    WHERE conveyancer_id = $2))
           AND ($3::integer IS NULL OR smtp_code = $3 OR server_reply LIKE $3::text || ' %')
           AND ($4::text IS NULL OR strpos(server_reply, $4) > 0)
           AND ($5::timestamptz IS NULL OR coalesce(settled_at, created_at) >= $5)
           AND ($6::timestamptz IS NULL OR coalesce(settled_at, created_at) < $6)"""
# The e-mail is the last one of its request, and the request has not been erased.
_LAST = """(EXISTS (SELECT
                          FROM calculation_request AS request
                         WHERE request.id = email.request_id)
                AND NOT EXISTS (SELECT
                                  FROM email AS later
                                 WHERE later.request_id = email.request_id
                                   AND (length(later.email_key), later.email_key)
                                       > (length(email.email_key), email.email_key)))"""
