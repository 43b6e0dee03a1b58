"""The waiver of the calculation fee: when it applies, and what its reason must be."""

from contextlib import suppress
from typing import Literal

import msgspec

from service import lines
from service.calculation_requests import conveyancers, reading
from service.calculation_requests.fields import REASON_CHARACTERS
from service.calculation_requests.idempotency import Idempotency, IdempotencyKeyInFlight, IdempotencyKeyReused
from service.postgres.pool import Connection

ReasonFault = Literal["missing", "not_text", "too_long", "blank", "has_nul"]


class RequestedWaiver(msgspec.Struct, frozen=True):
    """A waiver that a caller asks for. A fault in its reason matters only if the waiver applies."""

    reason_fault: ReasonFault | None


def find_fault(reason: object) -> ReasonFault | None:
    """Return what is wrong with a reason, which may be any JSON value; None if it is acceptable."""
    if reason is None:
        return "missing"
    if not isinstance(reason, str):
        return "not_text"
    if len(reason) > REASON_CHARACTERS:
        return "too_long"
    if lines.is_blank(reason):
        return "blank"
    return "has_nul" if "\0" in reason else None


async def applies(
    connection: Connection, waiver: RequestedWaiver, *, conveyancer_id: str, idempotency: Idempotency | None
) -> bool:
    """Whether a waiver applies. It is ignored if the conveyancer charges no calculation fee.

    A repeat of a create whose waiver was ignored must succeed even if the conveyancer has begun to charge. So
    a bad reason is no error if a request with the same key is stored. Raises UnknownConveyancer, and
    RequestErased if the request with that key was erased.
    """
    if not await conveyancers.charges_calculation_fee(connection, conveyancer_id):
        return False
    if waiver.reason_fault is None or idempotency is None:
        return True
    with suppress(IdempotencyKeyInFlight, IdempotencyKeyReused):
        await reading.find_by_idempotency_key(connection, idempotency, conveyancer_id=conveyancer_id)
        return False
    return True
