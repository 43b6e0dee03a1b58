"""The values that tests and measurements use unless they need others."""

from typing import Any

SECRET_KEYS = "current:" + "A" * 43 + ",older:" + "B" * 43
CONVEYANCER = "acme-conveyancing"  # charges a calculation fee
FREE_CONVEYANCER = "free-conveyancing"  # does not

STRUCTURE = "/v1/questionnaire/structure"

A_REQUEST: dict[str, Any] = {
    "customer_email": "ada@customer.example.com",
    "customer_first_name": "Ada",
    "customer_last_name": "Lovelace",
    "sender_email": "grace@firm.example.com",
    "sender_organization_name": "Hopper & Partners",
    "sender_first_name": "Grace",
    "sender_last_name": "Hopper",
    "case_ref": "12 High Street",
}

_HOUSE = "\U0001f3e0"  # four bytes in UTF-8
_ADDRESS = "b" * 64 + "@" + ".".join(["b" * 63, "b" * 63, "b" * 57]) + ".com"
A_LARGEST_REQUEST: dict[str, Any] = {  # Every field is at its limit.
    **dict.fromkeys(A_REQUEST, _HOUSE * 255),
    **dict.fromkeys(("customer_email", "sender_email"), _ADDRESS),
    "customer_phone": _HOUSE * 32,
    "property_value": 10**12,
    "notes": _HOUSE * 10_000,
    "external_id": _HOUSE * 255,
    "meta_data": {"a": "b" * (16 * 1024 - len('{"a":""}'))},
    "calculation_fee_exempt": True,
    "calculation_fee_exempt_reason": _HOUSE * 500,
}
