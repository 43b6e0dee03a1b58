"""Every body is stored, or refused for reasons that the document lists."""

import json
import random
from collections import Counter
from collections.abc import Iterator
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
from service.api.openapi.examples import FULL_REQUEST, SMALLEST_REQUEST
from service.server.limits import LARGEST_BODY
from tests.fuzz.conftest import LONG
from tests.harness.stored import ANY_TEXTS

# Names and values are JSON text, so that both can be anything.
_CHARACTERS = [
    *("\0", "\x1b", "\x7f", "\x85", "\u00a0", "\u200b", "\u2028", "\u202e", "\u2066", "\ufeff", "\U0001f3e0"),
    *("e\u0301", "\u0130", "\uff21", "\u3000", "\n", "\r\n", "\t"),
    *("@", ",", ";", "<", '"', "\\", "/", "~", "%00"),
]
_ESCAPES = [
    *("\\u0000", "\\ud800", "\\udc00\\ud800", "\\ud83c\\udfe0", "\\u2028"),
    *("\\x00", "\\u12", "\\", "\\/"),
]
_NUMBERS = [
    *("0", "-0", "-1", "1", "300000.0", "3e5", "0.5", "1e12", "1000000000000", "1000000000001"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775809"),
    *("1e308", "1e400", "-1e400", "1e-400", "9" * 400, "9" * 5000, "0." + "1" * 400),
    *("01", "1.", ".5", "+1", "0x10", "1_000", "NaN", "Infinity", "--1"),
]
_LENGTHS = [1, 32, 33, 254, 255, 256, 500, 501, 10_000, 10_001, 16_384, 70_000]
_DEPTHS = [14, 15, 16, 17, 200, 2_000, 20_000]
_VALUES = [
    *("null", "true", "false", '""', '" "', '"300000"', '"true"'),
    *("[]", "{}", "[[]]", '{"a":{}}', '[{"a":[1]}]'),
    *("tru", "nul", "'a'", "undefined", "", "[", "{", '{"a"}', "[1,]", '{"a":1,}', "/**/1"),
    *('"a@b.test"', '"a@b.test,c@d.test"', '"ada"', '"@"', '"ada@localhost"', '"ada@[127.0.0.1]"'),
    *('"ada@b\u00fccher.test"', '{"\\u0000":1}', '{"a":"\\u0000"}', '{"":""}'),
    *('{"a":1e300}', '{"a":9223372036854775808}'),
    *(json.dumps(f"a{character}b") for character in _CHARACTERS),
    *(f'"a{escape}b"' for escape in _ESCAPES),
    *(json.dumps(character * length) for character in ("a", "\U0001f3e0") for length in _LENGTHS),
    *(f'{{"a":"{"a" * length}"}}' for length in _LENGTHS),
    *('{"a":' + "[" * depth + "1" + "]" * depth + "}" for depth in _DEPTHS),
    *('{"a":' * depth + "1" + "}" * depth for depth in _DEPTHS),
]
_NAMES = [
    *('"unknown"', '"a/b~c"', '"~1~0"', '""', '"Case_Ref"', '"\\u0000"', '"\\ud800"', '"\u202e"'),
    *("1", "case_ref", '"notes":1,"notes"', '"case_ref":"12 High Street","case_ref"'),
]
_BYTES = [
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\xef\xbb\xbf", b"\xe2\x80"),
    *(b'"', b"}"),
]


def mutants(chance: random.Random) -> Iterator[bytes]:
    """Yield bodies without end, the same ones for the same seed."""
    while True:
        valid = chance.choice([SMALLEST_REQUEST, FULL_REQUEST])
        fields = {json.dumps(name): json.dumps(value) for name, value in valid.items()}
        for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
            name = chance.choice([*fields, *_NAMES])
            fields[name] = chance.choice(chance.choice([_VALUES, _NUMBERS]))
            if chance.random() < 0.1:
                del fields[name]
        members = ",".join(f"{name}:{value}" for name, value in fields.items())
        body = f"{{{members}}}".encode(errors="surrogatepass")
        yield _change_bytes(body, chance) if chance.random() < 0.3 else body


def _change_bytes(body: bytes, chance: random.Random) -> bytes:
    """Put other bytes in the place of some, or of none, or encode the text otherwise."""
    if chance.random() < 0.2:
        encoding = chance.choice(["utf-16", "utf-32", "utf-8-sig", "latin-1"])
        return body.decode(errors="replace").encode(encoding, errors="replace")
    start, end = sorted(chance.choices(range(len(body) + 1), k=2))
    return body[:start] + chance.choice([*_BYTES, b""]) + body[chance.choice([start, end]) :]


_BODIES = 200_000 if LONG else 4_000
_SENT = 10_000 if LONG else 200
_BODY: Any = msgspec.to_builtins(app.describe()["components"]["schemas"]["CreateBody"])
# Without a waiver the API ignores this field. The document does not say so, because it asks for a text.
del _BODY["properties"]["calculation_fee_exempt_reason"]["type"]
_ALLOWED = jsonschema_rs.Draft202012Validator(_BODY)
# What no schema can say: which texts a format allows, as of addresses; how long and deep `meta_data` is and
# what is in it. And what no pattern can say that means the same everywhere: which texts are visible, and
# which characters are not.
_BEYOND_SCHEMAS = {
    *("too_deep", "blank", "invalid_characters", ("/meta_data", "too_long"), ("/meta_data", "out_of_range")),
    *(f"/{name}" for name, field in _BODY["properties"].items() if field.get("format", "int64") != "int64"),
}


def test_every_body_is_accepted_or_refused_as_documented():
    outcomes: Counter[str] = Counter()
    for body in islice(mutants(random.Random(20)), _BODIES):
        problems = judge(body)
        outcomes.update(set[str](problem.code for problem in problems) or {"accepted"})
        # Every error points to what it speaks of, and none to the same.
        assert len({error.pointer for error in problems}) == len(problems), body
        for error in problems:
            if error.pointer is None:
                assert error.code == "malformed_body", body
            elif error.pointer:
                name = error.pointer.removeprefix("/").replace("~1", "/").replace("~0", "~")
                assert name == error.field, body
                assert error.code == "required" or name in msgspec.json.decode(body), body
        # Exactly what the document forbids is refused, except for what no schema can say.
        reasons = {why for each in problems for why in (each.code, each.pointer, (each.pointer, each.code))}
        if not reasons & {"malformed_body", *_BEYOND_SCHEMAS}:
            assert _ALLOWED.is_valid(msgspec.json.decode(body)) == (not problems), (body, problems)

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
        defaults = {"request_type": "SDLT_CALCULATION", "calculation_fee_exempt": False}
        fields = dict.fromkeys(FULL_REQUEST) | defaults | msgspec.json.decode(body)
        fields |= {name: fields[name] or None for name in ANY_TEXTS}
        if not fields["calculation_fee_exempt"]:
            fields["calculation_fee_exempt_reason"] = None
        assert record == record | fields, body
        assert (await client.get(f"/v1/request/{record['uuid']}")).json()["data"] == record
    return response.status_code
