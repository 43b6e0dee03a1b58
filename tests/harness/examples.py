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
