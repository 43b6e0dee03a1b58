"""Whether a mail program would make a link of a text."""

import re
import unicodedata

from linkify_it import LinkifyIt
from linkify_it.tlds import TLDS

_INTERNATIONAL = [name.lower().encode().decode("idna") for name in TLDS if name.startswith("XN--")]
_linkifier = LinkifyIt(options={"fuzzy_ip": True}).tlds([*TLDS, *_INTERNATIONAL])

# What the linkifier does not know: other schemes, file shares, top-level domains younger than its list. The
# last makes a link of St.John too; J.Smith it leaves alone.
_SIGNS = re.compile(r"://|\\\\|\w\w\.[^\W\d_]{2}")

_DOTS = str.maketrans("\N{IDEOGRAPHIC FULL STOP}", ".")  # NFKC makes one or the other of all dots of IDNA
_FILLERS = "\N{HANGUL CHOSEONG FILLER}\N{HANGUL JUNGSEONG FILLER}"
_AROUND_WORDS = re.compile(r"[^\w.-]|_|(?<!\w)[.-]+|[.-]+(?!\w)")


def has_link(text: str) -> bool:
    """Whether a linkifier finds a link in a text, in whatever characters it is written.

    Mail programs differ: some drop what nobody sees, some end a link there, some begin one behind any sign.
    """
    plain = unicodedata.normalize("NFKC", text).translate(_DOTS)
    joined, parted = (_without_unseen(plain, instead=instead) for instead in ("", " "))
    forms = {text, plain, joined, parted, *(_AROUND_WORDS.sub(" ", form) for form in (joined, parted))}
    return any(_SIGNS.search(form) or _linkifier.test(form) for form in forms)


def _without_unseen(text: str, *, instead: str) -> str:
    """Replace format characters, fillers, and marks that no letter has taken up."""
    return "".join(
        instead
        if character in _FILLERS or unicodedata.category(character) in {"Cc", "Cf", "Mn", "Me"}
        else character
        for character in text
    )
