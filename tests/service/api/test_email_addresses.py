"""E-mail addresses are accepted exactly if email-validator accepts them, except for encoded words."""

import re
import time

import email_validator
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.errors import InvalidSubmission
from service.calculation_requests import email_addresses
from tests.harness.examples import A_REQUEST

_PARTS = st.text("ab1.-_+=? \"'<>é(@", max_size=70)
_DOMAINS = st.sampled_from(
    [
        *("example.com", "a.test", "localhost", "1.2.3.4", "a..b", "-a.com", "ab--c.com", "x.é"),
        *("xn--bcher-kva.example", "\u06f0" * 64 + ".example", "é" * 63 + "\u3002" + "é" * 20 + ".example"),
    ]
)


def is_valid(address: str) -> bool:
    """Whether email-validator accepts an address under the rules of the product."""
    try:
        email_validator.validate_email(
            address, check_deliverability=False, allow_smtputf8=False, test_environment=True, strict=True
        )
    except email_validator.EmailNotValidError:
        return False
    return not re.search(r"=\?.*\?=", address)


@given(local=_PARTS, domain=_DOMAINS | _PARTS)
@example(local="a" * 64, domain=".".join(["xn--fiqa" + "a" * 30] * 3) + ".example")
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_address_is_accepted_exactly_if_email_validator_accepts_it(local, domain):
    address = f"{local}@{domain}"

    try:
        parse(CreateBody, msgspec.json.encode(A_REQUEST | {"customer_email": address}))
    except InvalidSubmission:
        is_accepted = False
    else:
        is_accepted = True

    assert is_accepted == (is_valid(address) and len(address) <= 254 and bool(address.strip()))


@pytest.mark.parametrize("digit", ["0", "\u0660", "\u06f0", "\u0966"])
def test_domain_of_many_digits_is_refused_quickly(digit):
    began = time.process_time()
    for length in range(100, 250):
        assert email_addresses.find_fault(f"a@{digit * length}.com")

    assert time.process_time() - began < 0.3, "it took up to 20 ms for each"
