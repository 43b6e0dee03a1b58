"""`request find|correct|new-secret|erase`: the requests of customers who call, and of every firm."""

import hashlib
import secrets
from datetime import datetime
from uuid import UUID

import click
import msgspec

from service.calculation_requests import email_addresses, reading
from service.calculation_requests.model import RequestNotFound, now
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import Answer, answering, line, on_record, postgres, uuid
from service.identifiers import uuid_of
from service.operations import announcing, email_changes, erasing, operator_actions
from service.operations.operator_actions import Operator
from service.outbox import lanes
from service.postgres import loans
from service.postgres.pool import Connection
from service.settings import Settings, load

_MOST_FOUND = 50


request = click.Group("request", help="Find requests, change the address or the link of one, erase one.")


class Found(msgspec.Struct, frozen=True):
    """A request, without personal data."""

    uuid: str
    conveyancer: str
    created_at: datetime
    external_id: str | None
    calculation_id: str | None


@request.command()
@click.option("--external-id", type=line, help="The firm's own identifier.")
@click.option("--customer-email", metavar="ADDRESS", type=line, help="The customer's address, in any case.")
@click.option("--case-ref", type=line, help="The case reference.")
@answering
async def find(external_id: str | None, customer_email: str | None, case_ref: str | None) -> Answer:
    """Find requests by what a caller on the phone knows: the newest 50, without personal data."""
    if not (external_id or customer_email or case_ref):
        raise click.UsageError("Say what to find: --external-id, --customer-email or --case-ref.")
    address = customer_email and hashlib.sha256(customer_email.lower().encode()).digest()
    async with postgres() as connection:
        rows = await connection.fetch(_FIND, external_id, address, case_ref, _MOST_FOUND)
    found = [Found(uuid_of(request_id), *rest) for request_id, *rest in rows]
    return Answer.listing(found)


# Postgres gets the hash of the address: it may log the parameters of a slow statement, and this one may read
# all rows.
_FIND = """
    SELECT id, conveyancer_id, created_at, external_id, calculation_id
      FROM calculation_request
     WHERE ($1::text IS NULL OR external_id = $1)
       AND ($2::bytea IS NULL OR sha256(convert_to(lower(customer_email), 'UTF8')) = $2)
       AND ($3::text IS NULL OR case_ref = $3)
     ORDER BY id DESC
     LIMIT $4
"""


class Changed(msgspec.Struct, frozen=True):
    """What came of a change: whether there was any, and the event_id of the e-mail that the customer gets."""

    uuid: str
    changed: bool
    email: str | None = None


@request.command()
@click.argument("uuid", type=uuid)
@click.option("--customer-email", metavar="ADDRESS", required=True)
@click.option("--no-email", is_flag=True, help="Send no e-mail with the new link.")
@answering
@on_record
async def correct(uuid: UUID, customer_email: str, by: Operator, *, no_email: bool) -> Answer:
    """Correct the customer's address. The link that was sent is dead; the right customer gets a new one."""
    if not email_addresses.is_accepted(customer_email):
        raise click.UsageError("--customer-email: expected the e-mail address of exactly one recipient.")
    return await _answer(uuid, "request correct", by, customer_email, sends_email=not no_email)


@request.command("new-secret")
@click.argument("uuid", type=uuid)
@click.option("--no-email", is_flag=True, help="Send no e-mail with the new link.")
@answering
@on_record
async def new_secret(uuid: UUID, by: Operator, *, no_email: bool) -> Answer:
    """Make a new link for the customer. The one that was sent is dead, also if this command sent it."""
    return await _answer(uuid, "request new-secret", by, None, sends_email=not no_email)


async def _answer(
    request_id: UUID, action: str, by: Operator, address: str | None, *, sends_email: bool
) -> Answer:
    keys = SecretKeyRing.parse(load(Settings).request_secret_keys)
    async with postgres() as connection, loans.bounded_transaction(connection):
        changed = await change(
            connection, request_id, address, key_id=keys.current_id, sends_email=sends_email
        )
        if changed.changed:
            await operator_actions.record(connection, action, [(request_id, changed.email)], by)
    if not changed.changed:
        return Answer(changed, f"{changed.uuid} has this address already: nothing was changed")
    email = f"e-mail {changed.email} is due" if changed.email else "no e-mail is sent"
    return Answer(changed, f"{changed.uuid} has a new secret; {email}")


async def change(
    connection: Connection, request_id: UUID, address: str | None, *, key_id: str, sends_email: bool
) -> Changed:
    """Give a request a new secret, and its customer's address, in the caller's transaction.

    Without an address it is as before. Pending e-mails are cancelled, because they may have been claimed with
    the old address and the dead link.

    Raises RequestErased and RequestNotFound.
    """
    if not await announcing.lock(connection, [request_id]):
        await reading.check_erased(connection, request_id)
        raise RequestNotFound
    is_new = await connection.fetchval(
        """
        UPDATE calculation_request
           SET customer_email = coalesce($2, customer_email),
               secret_salt = $3,
               secret_key_id = $4,
               updated_at = $5
         WHERE id = $1
           AND customer_email IS DISTINCT FROM $2
        RETURNING true
        """,
        request_id,
        address,
        secrets.token_bytes(16),
        key_id,
        now(),
    )
    if not is_new:
        return Changed(uuid_of(request_id), changed=False)
    email = await email_changes.replace(connection, request_id, sends=sends_email)
    return Changed(uuid_of(request_id), changed=True, email=email)


class Erasure(msgspec.Struct, frozen=True):
    """What a command erased."""

    uuid: str
    was_erased_before: bool


@request.command()
@click.argument("uuid", type=uuid)
@answering
@on_record
async def erase(uuid: UUID, by: Operator) -> Answer:
    """Delete a request, and the personal data in its e-mails and events, for good."""
    async with postgres() as connection:
        async with loans.bounded_transaction(connection):
            is_new = await _erase(connection, uuid, by)
        await lanes.notify(connection)
    done = "erased" if is_new else "had been erased"
    return Answer(Erasure(uuid_of(uuid), was_erased_before=not is_new), f"{uuid_of(uuid)} {done}")


async def _erase(connection: Connection, request_id: UUID, by: Operator) -> bool:
    """Erase a request, and record it. Returns False if it had been erased. Raises RequestNotFound."""
    await lanes.lock(connection, lanes.lane_of(request_id))
    if await erasing.erase(connection, [request_id]):
        await operator_actions.record(connection, "request erase", [(request_id, None)], by)
        return True
    if not await reading.find_erased(connection, [request_id]):
        raise RequestNotFound
    return False
