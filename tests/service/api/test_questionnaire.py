"""The questionnaire: its file against the table of the interface, its loader, its ETag."""

import re

import pytest

from service.api.controllers.questionnaire import load
from tests.harness.examples import STRUCTURE
from tests.harness.http import bearer, lasting_headers

YES_NO = ["YES", "NO"]
OWNS_OTHER, LEASEHOLD = {"owns_other": "YES"}, {"is_leasehold": "YES"}
USES = ["RESIDENTIAL", "MIXED", "COMMERCIAL", "DEVELOPMENT"]
BUYERS = ["INDIVIDUAL", "COUPLE", "LIMITED_COMPANY", "CHARITY", "PENSION", "TRUST", "COUNCIL", "PARTNERSHIP"]

# interface.md, "The questions, in the order returned": ref, responseType, option values, conditions.
INTERFACE = [
    ("case_ref", "text", None, None),
    ("country", "radio_button", ["ENGLAND", "WALES", "SCOTLAND"], None),
    ("is_leasehold", "radio_button", YES_NO, None),
    ("lease_nature", "radio_button", ["NEW", "EXTENSION", "TAKEOVER"], LEASEHOLD),
    ("lease_type", "radio_button", ["RENT", "PREMIUM"], LEASEHOLD),
    ("lease_premium", "currency", None, LEASEHOLD | {"lease_type": "PREMIUM"}),
    ("lease_term", "number", None, LEASEHOLD | {"lease_type": "RENT"}),
    ("lease_rent_year_1", "currency", None, LEASEHOLD | {"lease_type": "RENT"}),
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


def test_questions_are_those_of_the_interface_in_its_order_and_do_not_speak_to_the_buyer():
    table, texts = [], []
    for question in load().questionnaire:
        options = question.response_options
        values = options and [option.value for option in options]
        table.append((question.ref, question.response_type, values, question.conditions))
        texts += [question.question, question.info, *(option.name for option in options or ())]

    assert table == INTERFACE
    assert [text for text in texts if not text or text != text.strip()] == []
    assert [text for text in texts if re.search(r"\byou", text, re.IGNORECASE)] == []  # always "the buyer"


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        # Two headers are one list. The tag may be weak, and may name the encoding of a gateway.
        (304, ['"other"|{tag}', "*", "{tag}", "W/{tag}", 'W/"{bare}-gzip"', '"{bare}-br"']),
        (304, ['"other", W/"{bare};gzip"', '"a, b" ,W/"other",{tag}']),
        (200, ['"other"', 'W/"other", "another"', "", '"*"', '"x{bare}"', '"x", "-gzip"', "{bare}"]),
    ],
)
async def test_questions_that_the_caller_already_has_are_not_sent_again(shared_client, status, headers):
    first = (await shared_client.get(STRUCTURE)).headers
    weak, _, tag = first["ETag"].partition("/")
    assert (weak, first["Cache-Control"]) == ("W", "private, no-cache")
    for if_none_match in headers:
        sent = if_none_match.format(tag=tag, bare=tag.strip('"')).split("|")
        response = await shared_client.get(STRUCTURE, headers=[("If-None-Match", each) for each in sent])

        assert response.status_code == status, sent
        if status == 304:
            kept = {name: first[name] for name in ("etag", "cache-control")}
            assert (response.content, dict(lasting_headers(response))) == (b"", kept)
            with_tag = {"If-None-Match": sent[-1]} | bearer("no token")
            assert (await shared_client.get(STRUCTURE, headers=with_tag)).status_code == 401
