"""The request that `make demo` sends."""

from typing import Any


def a_request(customer_email: str = "jane.doe@example.com") -> dict[str, Any]:
    """Return the body of a request for a calculation."""
    return {
        "customer_email": customer_email,
        "customer_first_name": "Jane",
        "customer_last_name": "Doe",
        "sender_email": "sam.smith@example.com",
        "sender_organization_name": "Demo Conveyancing",
        "sender_first_name": "Sam",
        "sender_last_name": "Smith",
        "case_ref": "CASE-1",
        "property_value": 300_000,
    }
