"""Invalid bodies: valid ones with mutated JSON, characters, numbers or bytes."""

import json
import random
from collections.abc import Iterator

from service.api.openapi.examples import FULL_REQUEST, SMALLEST_REQUEST

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
_BRACKETS = [("[", "]"), ('{"a":', "}")]
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
    *(
        '{"a":' + opening * depth + "1" + closing * depth + "}"
        for opening, closing in _BRACKETS
        for depth in _DEPTHS
    ),
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
