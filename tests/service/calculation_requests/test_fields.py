"""A field of the request is declared in each place that needs it, and documented."""

import re

from service import app
from service.api.bodies import CreateBody
from service.calculation_requests.model import (
    FOR_CUSTOMER,
    CalculationRequest,
    EventSource,
    RetrievedCalculationRequest,
)
from service.outbox.events import DetailedRequestEvent
from tests.deploy.pages import API, section

INTERNAL = {"id", "conveyancer_id", "sequence", "secret_salt", "secret_key_id"}
MADE = {"uuid", "secret", "request_url"}  # for the view, of the internal columns
SET_BY_THE_SERVICE = {"created_at", "updated_at", "calculation_id"}
COLUMNS = set(CalculationRequest.__struct_fields__)
SHOWN = set(RetrievedCalculationRequest.__struct_fields__)


def test_every_field_is_sent_stored_and_shown():
    assert COLUMNS - INTERNAL == SHOWN - MADE == {*CreateBody.__struct_fields__} | SET_BY_THE_SERVICE


def test_events_carry_the_fields_that_their_source_has_and_no_others():
    fields = {*CreateBody.__struct_fields__}

    in_one_alone = fields & ({*EventSource.__struct_fields__} ^ {*DetailedRequestEvent.__struct_fields__})
    assert in_one_alone == set(), "EventSource in model.py, DetailedRequestEvent in events.py"


def test_customer_sees_nothing_internal():
    assert set(FOR_CUSTOMER) <= COLUMNS - INTERNAL


def test_fields_have_the_same_order_in_the_body_and_in_the_answer():
    sent = CreateBody.__struct_fields__

    assert [name for name in RetrievedCalculationRequest.__struct_fields__ if name in sent] == [*sent]


def test_pages_name_every_field_that_is_the_firms_alone():
    retrieve = app.describe()["paths"]["/v1/request/{uuid}"]["get"]["description"]
    own = {*CreateBody.__struct_fields__} - {*FOR_CUSTOMER}

    for text in (section(API, "Tokens"), retrieve):
        not_named = own - set(re.findall(r"`(\w+)`", text))
        assert not not_named, "name it, or make it ForCustomer[…] in model.py if the customer may see it"


async def test_table_has_the_columns_of_the_struct(database):
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 'calculation_request'"
    rows = await database.fetch(columns)

    not_read = {"idempotency_key", "idempotency_sha256", "refused_calculation_id", "withdrawn_at"}
    assert {row["column_name"] for row in rows} ^ COLUMNS == not_read
