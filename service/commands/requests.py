"""`request find|correct|new-secret|erase`: find and change the requests of any firm."""

import hashlib
from collections.abc import Sequence
from uuid import UUID

import click

from service.calculation_requests import conveyancers, email_addresses, email_changes, erasing, reading
from service.calculation_requests.changing import change
from service.calculation_requests.request_secrets import SecretKeyRing
from service.command_line import connecting, operator_actions, parameters
from service.command_line.answering import Answer, Operator, answering, on_record
from service.identifiers import uuid_of
from service.outbox import waking
from service.postgres.pool import Connection
from service.settings import SecretKeySettings, load

_MOST_ERASED = 500  # by one command, in one transaction

request = click.Group("request", help="Find, correct or erase a request, or make a new link for it.")


@request.command()
@click.option("--external-id", type=parameters.line, help="The firm's own identifier.")
@click.option("--customer-email", metavar="ADDRESS", type=parameters.email_address, help="In any spelling.")
@click.option("--case-ref", type=parameters.line, help="The case reference, whatever its case and spaces.")
@parameters.firm
@parameters.limit
@answering
async def find(
    *,
    external_id: str | None,
    customer_email: str | None,
    case_ref: str | None,
    conveyancer_id: str | None,
    limit: int,
) -> Answer:
    """Find the newest requests that match all options. No personal data but the case reference are shown."""
    if not (external_id or customer_email or case_ref or conveyancer_id):
        raise click.UsageError("Say what to find: see --help.")
    case_ref = case_ref and "".join(case_ref.split())
    async with connecting.postgres() as connection:
        ids = await _find_customer(connection, customer_email) if customer_email else None
        rows = await connection.fetch(_FIND, external_id, ids, case_ref, conveyancer_id, limit)
        if conveyancer_id and not rows:
            await conveyancers.check_registered(connection, conveyancer_id)
    return Answer.listing(rows)


async def _find_customer(connection: Connection, address: str) -> list[UUID]:
    """Return the requests of a customer, however the address is spelled.

    Postgres knows no punycode. It gets only a hash, because it may log the parameters of a slow statement.
    """
    wanted = email_addresses.normalized(address)
    rows = await connection.fetch(
        """
        SELECT id, customer_email
          FROM calculation_request
         WHERE sha256(convert_to(lower(split_part(customer_email, '@', 1)), 'UTF8')) = $1
        """,
        hashlib.sha256(wanted.rpartition("@")[0].encode()).digest(),
    )
    return [request_id for request_id, found in rows if email_addresses.normalized(found) == wanted]


# Some locales do not count as \s the spaces that texts copied from documents have.
_FIND = r"""
    SELECT id AS uuid, conveyancer_id AS conveyancer, case_ref,
           (SELECT concat_ws(': ', state, reason)
              FROM email
             WHERE request_id = id
             ORDER BY number DESC
             LIMIT 1) AS email,
           created_at, external_id, calculation_id, withdrawn_at, count(*) OVER () AS total
      FROM calculation_request
     WHERE ($1::text IS NULL OR btrim(external_id) = $1)
       AND ($2::uuid[] IS NULL OR id = ANY($2))
       AND ($3::text IS NULL
            OR lower(regexp_replace(case_ref, '[\s\u00a0\u2000-\u200a\u202f]', '', 'g')) = lower($3))
       AND ($4::text IS NULL OR conveyancer_id = $4)
     ORDER BY id DESC
     LIMIT $5
"""


@request.command()
@click.argument("uuid", type=parameters.uuid)
@click.option("--customer-email", metavar="ADDRESS", type=parameters.email_address, required=True)
@click.option("--no-email", is_flag=True, help="Send no e-mail with the new link.")
@on_record
async def correct(uuid: UUID, customer_email: str, by: Operator, *, no_email: bool) -> Answer:
    """Correct the customer's address. Send a new link to this address. The old link is no longer valid."""
    return await _answer(uuid, "request correct", by, customer_email, sends=not no_email)


@request.command("new-secret")
@click.argument("uuid", type=parameters.uuid)
@click.option("--no-email", is_flag=True, help="Send no e-mail with the new link.")
@on_record
async def new_secret(uuid: UUID, by: Operator, *, no_email: bool) -> Answer:
    """Make a new link for the customer, and send it. All earlier links are no longer valid."""
    return await _answer(uuid, "request new-secret", by, None, sends=not no_email)


async def _answer(request_id: UUID, action: str, by: Operator, address: str | None, *, sends: bool) -> Answer:
    """Give a request a new secret, and its customer a new address unless *address* is None."""
    key_id = SecretKeyRing.parse(load(SecretKeySettings).request_secret_keys).current_id
    email = None
    async with (
        connecting.postgres() as connection,
        connecting.bounded_transaction(connection),
        change(connection, request_id) as request,
    ):
        is_new = address is None or address != request.customer_email
        if is_new:
            email = await email_changes.correct(
                connection, request, key_id=key_id, address=address, sends=sends
            )
            await operator_actions.record(connection, action, [(request_id, email and email.key)], by)
    changed = {"uuid": request.uuid, "changed": is_new, "email": email and email.key}
    if not is_new:
        again = f"`python -m worker emails resend --uuid {request.uuid} --sent` sends its e-mail again"
        said = f"{request.uuid} has this address already: nothing was changed. {again}"
        return Answer(changed, said, status=1)
    follows = f"e-mail {email.key} is due" if email else "no e-mail is sent"
    return Answer(changed, f"{request.uuid} has a new secret; {follows}")


@request.command()
@click.argument("uuids", type=parameters.uuid, nargs=-1, required=True, metavar="UUID...")
@on_record
async def erase(uuids: Sequence[UUID], by: Operator) -> Answer:
    """Permanently delete requests, and the personal data in their e-mails and events.

    The exit status is 1 if one of them has never existed. If the command fails, none is erased.
    """
    uuids = list(dict.fromkeys(uuids))
    if len(uuids) > _MOST_ERASED:
        raise click.UsageError(f"at most {_MOST_ERASED} requests at a time")
    async with connecting.postgres() as connection:
        async with connecting.bounded_transaction(connection):
            erased = await erasing.erase(connection, uuids)
            changed = [(uuid, None) for uuid in uuids if uuid in erased]
            await operator_actions.record(connection, "request erase", changed, by)
            known = await reading.find_erased(connection, uuids)
        await waking.notify(connection)
    results = {
        uuid_of(uuid): "erased" if uuid in erased else "erased before" if uuid in known else "no such request"
        for uuid in uuids
    }
    text = "\n".join(f"{uuid}: {result}" for uuid, result in results.items())
    return Answer(results, text, status=int(known < set(uuids)))
