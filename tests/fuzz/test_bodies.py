"""Every body is stored, or refused for reasons that the document lists."""

import random
from collections import Counter
from itertools import islice
from typing import Any

import httpx
import jsonschema_rs
import msgspec

from service import app
from service.api.bodies import CreateBody
from service.api.decoding import parse
from service.api.envelope import ErrorEnvelope, FieldError, fail
from service.api.errors import ApiError
from service.api.openapi.examples import FULL_REQUEST
from service.server.limits import LARGEST_BODY
from tests.fuzz.conftest import LONG
from tests.fuzz.mutations import mutants
from tests.harness.stored import ANY_TEXTS

_BODIES = 200_000 if LONG else 4_000
_SENT = 10_000 if LONG else 200
_BODY: Any = msgspec.to_builtins(app.describe()["components"]["schemas"]["CreateBody"])
# Without a waiver the API ignores this field. The document does not say so, because it asks for a text.
del _BODY["properties"]["calculation_fee_exempt_reason"]["type"]
_FIELDS = _BODY["properties"]
_ALLOWED = jsonschema_rs.Draft202012Validator(_BODY)
# What no schema can say: which texts a format allows, as of addresses; how long and deep `meta_data` is and
# what is in it. And what no pattern can say that means the same everywhere: which texts are visible, and
# which characters are not.
_BEYOND_SCHEMAS = {
    *("too_deep", "blank", "invalid_characters"),
    *(f"/{name}" for name, field in _FIELDS.items() if field.get("format", "int64") != "int64"),
    *(
        (f"/{name}", code)
        for name in _FIELDS
        if "object" in _FIELDS[name].get("type", ())
        for code in ("too_long", "out_of_range")
    ),
}


def test_every_body_is_accepted_or_refused_as_documented():
    outcomes: Counter[str] = Counter()
    for body in islice(mutants(random.Random(20)), _BODIES):
        problems = judge(body)
        outcomes.update(set[str](problem.code for problem in problems) or {"accepted"})
        check_pointers(body, problems)
        check_against_schema(body, problems)

    print(f"{_BODIES} bodies:", dict(outcomes.most_common()))
    assert outcomes.keys() >= {"accepted", "malformed_body", "required", "too_long", "unknown_field", "blank"}


async def test_service_answers_as_the_validator_judges_and_returns_what_was_sent(client):
    client.headers["Content-Type"] = "application/json"
    answers = Counter([await send(client, body) for body in islice(mutants(random.Random(21)), _SENT)])

    print(f"{_SENT} bodies sent:", dict(answers))
    assert {200, 400, 422} <= answers.keys() <= {200, 400, 413, 422}


def judge(body: bytes) -> list[FieldError]:
    """Return why *body* is refused, as a caller would read it."""
    try:
        parsed = parse(CreateBody, body)
        parsed.validated(waiver_applies=parsed.calculation_fee_exempt)
    except ApiError as error:
        answer = msgspec.json.encode(fail(error.status, error.errors))
        problems = msgspec.json.decode(answer, type=ErrorEnvelope).errors
        assert problems
        return problems
    except Exception as error:
        raise AssertionError(body) from error
    return []


def check_pointers(body: bytes, problems: list[FieldError]) -> None:
    """Check that every error points to what it speaks of, and none to the same."""
    assert len({error.pointer for error in problems}) == len(problems), body
    for error in problems:
        if error.pointer is None:
            assert error.code == "malformed_body", body
        elif error.pointer:
            name = error.pointer.removeprefix("/").replace("~1", "/").replace("~0", "~")
            assert name == error.field, body
            assert error.code == "required" or name in msgspec.json.decode(body), body


def check_against_schema(body: bytes, problems: list[FieldError]) -> None:
    """Check that exactly what the document forbids is refused, except for what no schema can say."""
    reasons = {reason for each in problems for reason in (each.code, each.pointer, (each.pointer, each.code))}
    if not reasons & {"malformed_body", *_BEYOND_SCHEMAS}:
        assert _ALLOWED.is_valid(msgspec.json.decode(body)) == (not problems), (body, problems)


async def send(client: httpx.AsyncClient, body: bytes) -> int:
    """Send *body*, check the answer and what is stored, and return the status."""
    response = await client.post("/v1/request", content=body)
    if len(body) > LARGEST_BODY:
        assert response.status_code == 413
        return 413
    expected = [problem.code for problem in judge(body)]
    assert [error["code"] for error in response.json()["errors"] or []] == expected, body
    if not expected:
        record = response.json()["data"]
        assert record == record | returned(msgspec.json.decode(body)), body
        assert (await client.get(f"/v1/request/{record['uuid']}")).json()["data"] == record
    return response.status_code


def returned(sent: dict[str, Any]) -> dict[str, Any]:
    """Return the fields as the API returns them: null where left out, except for two defaults."""
    defaults = {"request_type": "SDLT_CALCULATION", "calculation_fee_exempt": False}
    fields = dict.fromkeys(FULL_REQUEST) | defaults | sent
    fields |= {name: fields[name] or None for name in ANY_TEXTS}
    if not fields["calculation_fee_exempt"]:
        fields["calculation_fee_exempt_reason"] = None
    return fields
