"""The rules for single lines of text, such as names: which characters they may contain, and the messages."""

import re
import unicodedata
from typing import Literal, NamedTuple

CHARACTERS = 255

# Control characters, line and paragraph separators, and the bidirectional controls of UAX #9, which can make
# one name look like another. This and the next two constants go inside character classes of regular
# expressions.
_FORBIDDEN_CHARACTERS = r"\u0000-\u001f\u007f-\u009f\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
_SPACES = r" \u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"

# Characters that are invisible on their own: Default_Ignorable_Code_Point of DerivedCoreProperties.txt
# (Unicode 16.0), the annotation characters U+FFF9 to U+FFFB, the blanks that Unicode classifies as letters or
# symbols, and the combining marks that belong to no script. The combining marks of scripts are not listed,
# because they would take hundreds of ranges, and fonts show them on a dotted circle.
_INVISIBLE = (
    r"\u00ad\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800"
    r"\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    r"\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\u3099\u309a\ufe20-\ufe2f"
    r"\U00013441\U00013442\U0001bca0-\U0001bca3\U0001d159\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)

_FORBIDDEN = re.compile(f"[{_FORBIDDEN_CHARACTERS}\\ud800-\\udfff]")  # Surrogates cannot be stored.
_SHOWN = re.compile(f"[^{_FORBIDDEN_CHARACTERS}{_SPACES}{_INVISIBLE}]")


class Fault(NamedTuple):
    """Why a text is rejected: a code, and a message for its author."""

    code: Literal["blank", "invalid_characters"]
    message: str


BLANK = Fault("blank", "This field must not be blank.")
_NOT_ALLOWED = "Control, line-separator and bidirectional characters are not allowed: remove or replace "


def check_line(value: str) -> Fault | None:
    """Return the fault of *value*, or None if it is a single line of text."""
    found = _FORBIDDEN.search(value)
    return Fault("invalid_characters", f"{_NOT_ALLOWED}{named(found[0])}.") if found else None


def check_filled_line(value: str) -> Fault | None:
    """Return the fault of *value*, or None if it is a single line of text with a visible character."""
    if not value.strip():
        return BLANK
    return check_line(value) or (BLANK if is_blank(value) else None)


def named(character: str) -> str:
    """Return the code point of a character, and its name. Control characters have none."""
    return f"U+{ord(character):04X} {unicodedata.name(character, '')}".rstrip()


def is_blank(value: str) -> bool:
    """Whether *value* has no visible character: only spaces, controls, joiners, fillers and lone marks."""
    return not _SHOWN.search(value)
