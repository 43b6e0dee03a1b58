"""Every body is stored, or refused for reasons that the document lists."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import pytest

from service.api import request_body
from service.api.envelope import ErrorEnvelope
from service.api.errors import ApiError
from service.contracts import openapi
from service.server.limits import LARGEST_BODY
from tests.end_to_end.callers import client_of
from tests.fuzz.conftest import LONG
from tests.fuzz.mutations import mutants

_BODIES = 200_000 if LONG else 4_000
_SENT = 10_000 if LONG else 200
# What no schema can say: how addresses are read, how long and deep `meta_data` is.
_BEYOND_SCHEMAS = {"/customer_email", "/sender_email", "too_deep", ("/meta_data", "too_long")}

Validator = Callable[[Any], bool]


@pytest.fixture(scope="module")
def allowed():
    """Whether the document allows a body."""
    document = openapi.document()
    reference = {"$ref": "#/components/schemas/CreateBody", "components": document["components"]}
    return jsonschema_rs.Draft202012Validator(reference).is_valid


def test_every_body_is_accepted_or_refused_as_documented(allowed):
    outcomes: Counter[str] = Counter()
    for body in islice(mutants(random.Random(20)), _BODIES):
        problems = _judge(body)
        outcomes.update({problem.code for problem in problems} or {"accepted"})
        _check_against_schema(body, problems, allowed)

    print(f"{_BODIES} bodies:", dict(outcomes.most_common()))
    assert outcomes.keys() >= {"accepted", "malformed_body", "required", "too_long", "unknown_field", "blank"}


async def test_service_answers_as_the_validator_judges(api, issuer):
    answers: Counter[int] = Counter()
    async with client_of(api, issuer.token()) as client:
        for body in islice(mutants(random.Random(21)), _SENT):
            answers[await _send(client, body)] += 1

    print(f"{_SENT} bodies sent:", dict(answers))
    assert answers.keys() >= {200, 400, 422}
    assert answers.keys() <= {200, 400, 413, 422}


def _judge(body: bytes) -> list[Any]:
    """Return why *body* is refused, as a caller would read it."""
    try:
        parsed = request_body.parse(body)
        parsed.validated(waiver_applies=parsed.asks_for_waiver)
    except ApiError as error:
        envelope = msgspec.json.decode(error.answer().body, type=ErrorEnvelope)
        assert envelope.errors
        _check_pointers(body, envelope)
        return envelope.errors
    except Exception as error:
        raise AssertionError(body) from error
    return []


def _check_pointers(body: bytes, envelope: ErrorEnvelope) -> None:
    """Check that every error points to what it speaks of, and none to the same."""
    pointers = [error.pointer for error in envelope.errors]
    assert len(set(pointers)) == len(pointers), body
    for error in envelope.errors:
        if error.pointer is None:
            assert error.code == "malformed_body", body
        elif error.pointer:
            name = error.pointer.removeprefix("/").replace("~1", "/").replace("~0", "~")
            assert name == error.field, body
            assert error.code == "required" or name in msgspec.json.decode(body), body


def _check_against_schema(body: bytes, problems: list[Any], allowed: Validator) -> None:
    codes = {problem.code for problem in problems}
    if "malformed_body" in codes:
        return
    explained = codes.union(*((problem.pointer, (problem.pointer, problem.code)) for problem in problems))
    assert allowed(msgspec.json.decode(body)) == (not codes) or explained & _BEYOND_SCHEMAS, (body, problems)


async def _send(client: httpx.AsyncClient, body: bytes) -> int:
    response = await client.post("/v1/request", content=body, headers={"Content-Type": "application/json"})
    if len(body) > LARGEST_BODY:
        assert response.status_code == 413
        return 413
    expected = [problem.code for problem in _judge(body)]
    assert [error["code"] for error in response.json()["errors"] or []] == expected, body
    if not expected:
        record = response.json()["data"]
        retrieved = await client.get(f"/v1/request/{record['uuid']}")
        assert retrieved.json()["data"] == record
    return response.status_code
