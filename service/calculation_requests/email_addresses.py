"""Which e-mail addresses are accepted: an address of one recipient, to whom an e-mail can be sent."""

import re
import unicodedata
from functools import lru_cache

import email_validator

from service import text_rules

LONGEST = 254  # characters

# An encoded word (RFC 2047) is valid in an address, but mail programs decode it. The e-mail would then go to
# another recipient, or could not be composed.
ENCODED_WORD = re.compile(r"=\?.*\?=")

# A label of a domain has at most 63 characters. Longer labels are rejected early, because validating them
# can take 20 ms, for example if they are Arabic digits. IDNA allows four characters as the dot.
_LONG_LABEL = re.compile(r"[^.\u3002\uff0e\uff61]{64}")

# Valid if its domain is, because every such local part is. Decoding xn-- could make an address too long.
_PLAIN_ADDRESS = re.compile(r"(?ai)[\w+-]{1,32}(?:\.[\w+-]{1,31})?@((?!.*xn--)[a-z0-9.-]+)")


def find_fault(address: str) -> str | None:
    """Return what is wrong with *address*, without quoting it, or None if *address* is accepted."""
    plain = _PLAIN_ADDRESS.fullmatch(address)
    if len(address) <= LONGEST and _is_valid(f"a@{plain[1]}" if plain else address):
        return None
    local, _, domain = address.rpartition("@")
    unseen = next((each for each in address if unicodedata.category(each) in {"Zs", "Cf"}), None)
    faults = {
        "Expected the address alone, without a name or angle brackets.": "<" in address or ">" in address,
        "Expected one address, not several.": "@" in local or "," in address or ";" in address,
        "An e-mail address has no spaces and no invisible characters: remove "
        f"{unseen and text_rules.named(unseen)}.": unseen,
        "Expected an address such as ada@example.com: a name, an @ and a domain.": not (local and domain),
        "The domain after the @ is incomplete or invalid.": not _is_valid(f"a@{domain}"),
    }
    return next(
        (message for message, applies in faults.items() if applies),
        "The part before the @ is malformed, too long or not ASCII.",
    )


def normalized(address: str) -> str:
    """Return an accepted address as every spelling of it: in lower case, with its domain in punycode."""
    local, _, domain = address.lower().rpartition("@")
    if not domain.isascii():
        valid = email_validator.validate_email(
            f"a@{domain}", check_deliverability=False, test_environment=True
        )
        domain = valid.ascii_domain or domain
    return f"{local}@{domain}"


@lru_cache(maxsize=4096)  # Domains recur. Validating two addresses would take a tenth of a create.
def _is_valid(address: str) -> bool:
    if ENCODED_WORD.search(address) or _LONG_LABEL.search(address.rpartition("@")[2]):
        return False
    try:
        email_validator.validate_email(
            address,
            check_deliverability=False,  # no DNS
            allow_smtputf8=False,  # Without SMTPUTF8, mail servers reject a local part that is not ASCII.
            test_environment=True,  # allows `.test` domains, for trials
            strict=True,  # at most 64 characters before the @, because mail servers may reject more
        )
    except email_validator.EmailNotValidError:
        return False
    return True
