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


class WaiverRequest(msgspec.Struct, frozen=True):
    """A waiver as a caller asks for it. A fault in its reason matters only if the waiver applies."""

    reason_fault: ReasonFault | None


def request_waiver(reason: object) -> WaiverRequest:
    """Return the waiver that is asked for with this reason, which may be any JSON value."""
    return WaiverRequest(_reason_fault(reason))


def _reason_fault(reason: object) -> ReasonFault | None:
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
    connection: Connection, waiver: WaiverRequest, *, conveyancer_id: str, idempotency: Idempotency | None
) -> bool:
    """Whether a waiver applies: where the conveyancer charges no calculation fee, it is ignored.

    A repeat of a request whose waiver was ignored is not refused for its reason after the conveyancer has
    begun to charge. Raises UnknownConveyancer.
    """
    if not await conveyancers.charges_calculation_fee(connection, conveyancer_id):
        return False
    if waiver.reason_fault is None or idempotency is None:
        return True
    with suppress(IdempotencyKeyInFlight, IdempotencyKeyReused):
        await reading.find_first(connection, idempotency, conveyancer_id=conveyancer_id)
        return False
    return True
