"""`request find|correct|new-secret|erase`: find and change the requests of any firm."""

import hashlib
from datetime import datetime
from uuid import UUID

import click
import msgspec

from service.calculation_requests import email_addresses, email_changes, erasing, reading
from service.calculation_requests.changing import change
from service.calculation_requests.model import RequestNotFound
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, on_record
from service.identifiers import uuid_of
from service.outbox import waking
from service.settings import SecretKeySettings, load

request = click.Group("request", help="Find, correct or erase a request, or make a new link for it.")


class Found(msgspec.Struct, frozen=True):
    """A request, without personal data."""

    uuid: str
    conveyancer: str
    created_at: datetime
    external_id: str | None
    calculation_id: str | None
    withdrawn_at: datetime | None


@request.command()
@click.option("--external-id", type=parameters.line, help="The firm's own identifier.")
@click.option(
    "--customer-email", metavar="ADDRESS", type=parameters.line, help="The customer's, in any case."
)
@click.option("--case-ref", type=parameters.line, help="The case reference.")
@answering
async def find(external_id: str | None, customer_email: str | None, case_ref: str | None) -> Answer:
    """Find the newest 50 requests that match all options. Personal data are not shown."""
    if not (external_id or customer_email or case_ref):
        raise click.UsageError("Say what to find: --external-id, --customer-email or --case-ref.")
    address = customer_email and hashlib.sha256(customer_email.lower().encode()).digest()
    async with connecting.postgres() as connection:
        rows = await connection.fetch(_FIND, external_id, address, case_ref)
    return Answer.listing([Found(uuid_of(request_id), *rest) for request_id, *rest in rows])


# Postgres gets only the hash of the address, because it may log the parameters of a slow statement. This
# statement can be slow, because it may read all rows.
_FIND = """
    SELECT id, conveyancer_id, created_at, external_id, calculation_id, withdrawn_at
      FROM calculation_request
     WHERE ($1::text IS NULL OR btrim(external_id) = $1)
       AND ($2::bytea IS NULL OR sha256(convert_to(lower(customer_email), 'UTF8')) = $2)
       AND ($3::text IS NULL OR btrim(case_ref) = $3)
     ORDER BY id DESC
     LIMIT 50
"""


@request.command()
@click.argument("uuid", type=parameters.uuid)
@click.option("--customer-email", metavar="ADDRESS", required=True)
@click.option("--no-email", is_flag=True, help="Send no e-mail with the new link.")
@answering
@on_record
async def correct(uuid: UUID, customer_email: str, by: Operator, *, no_email: bool) -> Answer:
    """Correct the customer's address. Send a new link to this address. The old link is no longer valid."""
    if fault := email_addresses.find_fault(customer_email):
        raise click.UsageError(f"--customer-email: {fault}")
    return await _answer(uuid, "request correct", by, customer_email, sends_email=not no_email)


@request.command("new-secret")
@click.argument("uuid", type=parameters.uuid)
@click.option("--no-email", is_flag=True, help="Send no e-mail with the new link.")
@answering
@on_record
async def new_secret(uuid: UUID, by: Operator, *, no_email: bool) -> Answer:
    """Make a new link for the customer, and send it. All earlier links are no longer valid."""
    return await _answer(uuid, "request new-secret", by, None, sends_email=not no_email)


async def _answer(
    request_id: UUID, action: str, by: Operator, address: str | None, *, sends_email: bool
) -> Answer:
    """Give a request a new secret, and its customer a new address unless *address* is None."""
    keys = SecretKeyRing.parse(load(SecretKeySettings).request_secret_keys)
    email = None
    async with (
        connecting.postgres() as connection,
        connecting.bounded_transaction(connection),
        change(connection, request_id) as request,
    ):
        is_new = address is None or address != request.customer_email
        if is_new:
            email = await email_changes.correct(connection, request, keys, address=address, sends=sends_email)
            await operator_actions.record(connection, action, [(request_id, email and email.key)], by)
    changed = {"uuid": request.uuid, "changed": is_new, "email": email and email.key}
    if not is_new:
        return Answer(changed, f"{request.uuid} has this address already: nothing was changed")
    follows = f"e-mail {email.key} is due" if email else "no e-mail is sent"
    return Answer(changed, f"{request.uuid} has a new secret; {follows}")


@request.command()
@click.argument("uuid", type=parameters.uuid)
@answering
@on_record
async def erase(uuid: UUID, by: Operator) -> Answer:
    """Permanently delete a request, and the personal data in its e-mails and events."""
    async with connecting.postgres() as connection:
        async with connecting.bounded_transaction(connection):
            is_new = bool(await erasing.erase(connection, [uuid]))
            if is_new:
                await operator_actions.record(connection, "request erase", [(uuid, None)], by)
            elif not await reading.find_erased(connection, [uuid]):
                raise RequestNotFound
        await waking.notify(connection)
    said = f"{uuid_of(uuid)} {'erased' if is_new else 'had been erased'}"
    return Answer({"uuid": uuid_of(uuid), "was_erased_before": not is_new}, said)
