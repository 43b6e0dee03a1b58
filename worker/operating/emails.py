"""`emails list|resend`: the e-mails to customers, chosen by request, or by state, reply and time."""

import argparse
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple, get_args
from uuid import UUID

import msgspec

from service.calculation_requests import erased, event_history
from service.calculation_requests.model import RequestNotFound
from service.operations import emails, operator_actions, operator_arguments
from service.operations.operator_actions import Operator
from service.postgres import loans
from service.postgres.pool import Connection
from worker.operating import arguments, connections, email_statements
from worker.operating.answers import Answer, table
from worker.operating.arguments import InvalidArgument, Subcommands, add_command, add_group
from worker.operating.email_statements import EmailKey, LedgerEmail, Selection, State

_PAGE_EMAILS = 1000
_SHOWN = 10


class Changed(msgspec.Struct, frozen=True):
    """The e-mails that a command changed, or would change."""

    dry_run: bool
    emails: int
    keys: list[str]  # the first of them


class _Change(NamedTuple):
    """How the e-mails to change are found, and changed."""

    find: Callable[..., Awaitable[list[EmailKey]]]
    carry_out: Callable[[Connection, Sequence[EmailKey], Operator], Awaitable[list[EmailKey]]]


def add_to(commands: Subcommands) -> None:
    """Add the commands to the parser."""
    group = add_group(commands, "emails", "Show the e-mails to customers, and send them again.")
    listing = add_command(group, "list", list_emails)
    listing.add_argument("--state", choices=get_args(State), help="pending, sent or failed (default: all)")
    listing.add_argument("--limit", type=arguments.count, default=50, help="default: 50")
    resending = add_command(group, "resend", resend)
    resending.add_argument(
        "--sent", action="store_true", help="one that was sent, too; only together with --uuid"
    )
    retrying = add_command(group, "retry", retry)
    for command in (listing, retrying, resending):
        add = command.add_argument
        add("--uuid", type=arguments.request_id, help="only those of this request: req_…")
        add("--code", type=arguments.smtp_code, help="only those that the mail server last answered so")
        add(
            "--from",
            dest="since",
            type=arguments.time,
            metavar="TIME",
            help="ended, or if pending written, at or after this: ISO 8601, UTC without an offset",
        )
        add("--to", dest="until", type=arguments.time, metavar="TIME", help="exclusive (default: now)")
    for command in (retrying, resending):
        command.add_argument("--dry-run", action="store_true", help="count the e-mails, write nothing")
        operator_arguments.add_arguments(command)


async def list_emails(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Show e-mails, the newest first, with the mail server's last replies."""
    states = [options.state] if options.state else get_args(State)
    async with connections.postgres(environment) as connection:
        found = await email_statements.read(connection, _selection(options, states), limit=options.limit)
    headings = ("e-mail", "state", "reason", "attempts", "reply", "written", "ended", "next attempt")
    return Answer(found, table(headings, map(_row, found)) if found else "none")


def _row(email: LedgerEmail) -> tuple[object, ...]:
    return (
        email.key,
        email.state,
        email.reason,
        email.attempts,
        email.server_reply,
        email.created_at,
        email.settled_at,
        email.next_attempt_at,
    )


async def retry(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Make pending e-mails due now. Their attempts still count: they determine the next delay."""
    _check_chosen(options)
    return await _change(options, environment, ["pending"], _RETRY)


async def resend(options: argparse.Namespace, environment: Mapping[str, str]) -> Answer:
    """Send failed e-mails again, as new ones. Those of requests with another e-mail since are left alone.

    Those that operators cancelled are sent again only with --uuid.
    """
    _check_chosen(options)
    if options.sent and options.uuid is None:
        raise InvalidArgument("--sent needs --uuid: an e-mail that was sent is sent again for one request")
    states: list[State] = ["failed", "sent"] if options.sent else ["failed"]
    return await _change(options, environment, states, _RESEND)


def _check_chosen(options: argparse.Namespace) -> None:
    if options.uuid is None and options.code is None and options.since is None:
        raise InvalidArgument("say which e-mails: --uuid, --code or --from")


def _selection(options: argparse.Namespace, states: Sequence[State]) -> Selection:
    return Selection(
        states=states,
        request_id=options.uuid,
        smtp_code=options.code,
        since=options.since,
        until=options.until,
    )


async def _change(
    options: argparse.Namespace, environment: Mapping[str, str], states: Sequence[State], change: _Change
) -> Answer:
    """Change the selected e-mails page by page, each page and its record in one transaction.

    Those that end while the command runs are left alone.
    """
    selection, by = _selection(options, states), operator_arguments.operator(options)
    selection = msgspec.structs.replace(selection, until=options.until or datetime.now(UTC))
    keys: list[str] = []
    number, after = 0, ""
    async with connections.postgres(environment) as connection:
        while True:
            async with loans.bounded_transaction(connection):
                found = await change.find(connection, selection, after=after, limit=_PAGE_EMAILS)
                if not found:
                    break
                changed = found if options.dry_run else await change.carry_out(connection, found, by)
            number += len(changed)
            keys += [each.key for each in changed[: _SHOWN - len(keys)]]
            after = found[-1].key
        done = Changed(options.dry_run, number, keys)
        text = _described(done)
        if number == 0 and options.uuid is not None:
            text += f". {await _latest(connection, options.uuid)}"
    return Answer(done, text)


async def _latest(connection: Connection, request_id: UUID) -> str:
    """Return in a sentence what became of the latest e-mail of a request.

    Raises RequestErased and RequestNotFound.
    """
    await erased.check(connection, request_id)
    every = Selection(states=get_args(State), request_id=request_id)
    for email in await email_statements.read(connection, every, limit=1):
        return f"The latest of this request, {email.key}, is {email.state}."
    if not await event_history.read(connection, [request_id]):
        raise RequestNotFound
    return "This request has had none yet."


def _described(done: Changed) -> str:
    verb = "would be due" if done.dry_run else "due now"
    listed = "".join(f"\n  {key}" for key in done.keys)
    more = f"\n  and {done.emails - len(done.keys)} more" if done.emails > len(done.keys) else ""
    noun = "e-mail" if done.emails == 1 else "e-mails"
    return f"{done.emails} {noun} {verb}{listed}{more}"


async def _make_due(connection: Connection, found: Sequence[EmailKey], by: Operator) -> list[EmailKey]:
    await email_statements.make_due(connection, found)
    changed = [(each.request_id, each.key) for each in found]
    await operator_actions.record(connection, "emails retry", changed, by)
    return list(found)


async def _add_again(connection: Connection, found: Sequence[EmailKey], by: Operator) -> list[EmailKey]:
    added = await emails.add_again(connection, {each.key: each.request_id for each in found})
    await operator_actions.record(connection, "emails resend", added.items(), by)
    return [EmailKey(key, request_id) for request_id, key in added.items()]


_RETRY = _Change(email_statements.find_delayed, _make_due)
_RESEND = _Change(email_statements.find_ended, _add_again)
