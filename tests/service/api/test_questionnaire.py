"""The questionnaire: its file against the table of the interface, its loader, its ETag."""

import pytest

from service.api.controllers.questionnaire import load
from tests.harness.examples import STRUCTURE
from tests.harness.http import bearer, lasting_headers

YES_NO = ["YES", "NO"]
OWNS_OTHER = {"owns_other": "YES"}
USES = ["RESIDENTIAL", "MIXED", "COMMERCIAL", "DEVELOPMENT"]
BUYERS = ["INDIVIDUAL", "COUPLE", "LIMITED_COMPANY", "CHARITY", "PENSION", "TRUST", "COUNCIL", "PARTNERSHIP"]

# interface.md, "The questions, in the order returned": ref, responseType, option values, conditions.
INTERFACE = [
    ("case_ref", "text", None, None),
    ("country", "radio_button", ["ENGLAND", "WALES", "SCOTLAND"], None),
    ("is_leasehold", "radio_button", YES_NO, None),
    ("lease_nature", "radio_button", ["NEW", "EXTENSION", "TAKEOVER"], {"is_leasehold": "YES"}),
    ("lease_type", "radio_button", ["RENT", "PREMIUM"], {"is_leasehold": "YES"}),
    ("lease_premium", "currency", None, {"is_leasehold": "YES", "lease_type": "PREMIUM"}),
    ("lease_term", "number", None, {"is_leasehold": "YES", "lease_type": "RENT"}),
    ("lease_rent_year_1", "currency", None, {"is_leasehold": "YES", "lease_type": "RENT"}),
    ("property_value", "currency", None, {"is_leasehold": "NO"}),
    ("completion_date", "date", None, None),
    ("is_refinance", "radio_button", YES_NO, {"is_leasehold": "NO"}),
    ("buyer_type", "select", BUYERS, None),
    ("ftb_relief", "radio_button", YES_NO, None),
    ("owns_other", "radio_button", YES_NO, None),
    ("selling_main_residence", "radio_button", YES_NO, OWNS_OTHER),
    ("all_purchasers_on_title", "radio_button", YES_NO, OWNS_OTHER | {"selling_main_residence": "YES"}),
    ("replacing_pr", "radio_button", YES_NO, None),
    ("uk_resident", "radio_button", YES_NO, None),
    ("current_use", "radio_button", USES, None),
    ("intended_use", "radio_button", USES, None),
    ("is_dwelling", "radio_button", YES_NO, None),
    ("being_converted", "radio_button", YES_NO, {"is_dwelling": "NO"}),
    ("is_development", "radio_button", YES_NO, {"being_converted": "NO"}),
    ("is_purchase", "radio_button", YES_NO, None),
    ("has_annexes", "radio_button", YES_NO, None),
    ("num_dwellings", "number", None, None),
    ("has_grounds", "radio_button", YES_NO, None),
]


def test_questions_are_those_of_the_interface_in_its_order():
    table = []
    for question in load().questionnaire:
        values = question.response_options and [option.value for option in question.response_options]
        table.append((question.ref, question.response_type, values, question.conditions))

    assert table == INTERFACE


@pytest.mark.parametrize(
    ("if_none_match", "status"),
    [
        ('"other"|{tag}', 304),  # in two headers, which are one list
        ("*", 304),
        ("{tag}", 304),
        *((sent, 304) for sent in ('W/"{bare}-gzip"', '"{bare}-br"', '"other", W/"{bare};gzip"')),
        ('"a, b" ,W/"other",{tag}', 304),
        ('"other"', 200),
        ("", 200),
        ('"*"', 200),
        ('"x{bare}"', 200),
    ],
)
async def test_questions_that_the_caller_already_has_are_not_sent_again(shared_client, if_none_match, status):
    first = (await shared_client.get(STRUCTURE)).headers
    weak, _, tag = first["ETag"].partition("/")
    sent = if_none_match.format(tag=tag, bare=tag.strip('"')).split("|")

    response = await shared_client.get(STRUCTURE, headers=[("If-None-Match", each) for each in sent])

    assert weak == "W"
    assert first["Cache-Control"] == "private, no-cache"
    assert response.status_code == status
    if status == 304:
        assert response.content == b""
        assert dict(lasting_headers(response)) == {name: first[name] for name in ("etag", "cache-control")}
        refused = await shared_client.get(STRUCTURE, headers={"If-None-Match": sent[-1]} | bearer("no token"))
        assert refused.status_code == 401
