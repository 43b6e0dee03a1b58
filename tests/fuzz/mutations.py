"""Invalid bodies: valid ones with mutated JSON, characters, numbers or bytes."""

import json
import random
from collections.abc import Callable, Iterator

from service.api.openapi.examples import FULL_REQUEST, SMALLEST_REQUEST

Fields = list[tuple[str, str]]  # names and values as JSON text, so that both can be anything

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
_VALUES = [
    *("null", "true", "false", '""', '" "', '"300000"', '"true"'),
    *("[]", "{}", "[[]]", '{"a":{}}', '[{"a":[1]}]'),
    *("tru", "nul", "'a'", "undefined", "", "[", "{", '{"a"}', "[1,]", '{"a":1,}', "/**/1"),
    *('"a@b.test"', '"a@b.test,c@d.test"', '"ada"', '"@"', '"ada@localhost"', '"ada@[127.0.0.1]"'),
    *('"ada@b\u00fccher.test"', '{"\\u0000":1}', '{"a":"\\u0000"}', '{"":""}'),
    *('{"a":1e300}', '{"a":9223372036854775808}'),
]
_NAMES = [
    *('"unknown"', '"a/b~c"', '"~1~0"', '""', '"Case_Ref"', '"\\u0000"', '"\\ud800"', '"\u202e"'),
    *("1", "case_ref"),
]
_LENGTHS = [1, 32, 33, 254, 255, 256, 500, 501, 10_000, 10_001, 16_384, 70_000]
_DEPTHS = [14, 15, 16, 17, 200, 2_000, 20_000]
_BYTES = [
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\xef\xbb\xbf", b"\xe2\x80"),
    *(b'"', b"}"),
]


def mutants(chance: random.Random) -> Iterator[bytes]:
    """Yield bodies without end, the same ones for the same seed."""
    while True:
        valid = chance.choice([SMALLEST_REQUEST, FULL_REQUEST])
        fields = [(json.dumps(name), json.dumps(value)) for name, value in valid.items()]
        for _ in range(chance.choice([0, 1, 1, 1, 2, 3])):
            place = chance.randrange(len(fields))
            fields[place : place + 1] = chance.choice(_FIELD_MUTATIONS)(*fields[place], chance)
        members = ",".join(f"{name}:{value}" for name, value in fields)
        body = f"{{{members}}}".encode(errors="surrogatepass")
        if chance.random() < 0.3:
            body = _change_bytes(body, chance)
        yield body


def _replace_value(name: str, _: str, chance: random.Random) -> Fields:
    return [(name, chance.choice(chance.choice([_VALUES, _NUMBERS])))]


def _insert_character(name: str, value: str, chance: random.Random) -> Fields:
    at = chance.randrange(len(value) + 1)
    inserted = chance.choice([chance.choice(_ESCAPES), json.dumps(chance.choice(_CHARACTERS))[1:-1]])
    return [(name, value[:at] + inserted + value[at:])]


def _stretch(name: str, _: str, chance: random.Random) -> Fields:
    character = chance.choice(["a", " ", "\u00e9", "\U0001f3e0"])
    text = json.dumps(character * chance.choice(_LENGTHS), ensure_ascii=chance.random() < 0.5)
    return [(name, chance.choice([text, f'{{"a":{text}}}', f"[{text}]"]))]


def _nest(name: str, value: str, chance: random.Random) -> Fields:
    depth = chance.choice(_DEPTHS)
    opening, closing = chance.choice([("[", "]"), ('{"a":', "}")])
    return [(name, value), ('"meta_data"', f'{{"a":{opening * depth}1{closing * depth}}}')]


_FIELD_MUTATIONS: list[Callable[[str, str, random.Random], Fields]] = [
    *(_replace_value, _replace_value, _insert_character, _insert_character, _stretch, _nest),
    lambda _, value, chance: [(chance.choice(_NAMES), value)],
    lambda *_: [],
    lambda name, value, chance: [(name, value), (name, chance.choice([value, *_VALUES]))],
]


def _change_bytes(body: bytes, chance: random.Random) -> bytes:
    """Put other bytes in the place of some, or of none, or encode the text otherwise."""
    if chance.random() < 0.2:
        encoding = chance.choice(["utf-16", "utf-32", "utf-8-sig", "latin-1"])
        return body.decode(errors="replace").encode(encoding, errors="replace")
    start, end = sorted(chance.choices(range(len(body) + 1), k=2))
    return body[:start] + chance.choice([*_BYTES, b""]) + body[chance.choice([start, end]) :]
