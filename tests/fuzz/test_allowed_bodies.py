"""Every body that the OpenAPI document allows is stored, in any size and encoding."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import jsonschema_rs
import msgspec
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from service import text_rules
from service.calculation_requests.field_docs import META_DATA_BYTES, META_DATA_DEPTH
from service.contracts import openapi
from tests.fuzz.conftest import LONG

_EXAMPLES = 3_000 if LONG else 50
_DOCUMENT = msgspec.json.decode(msgspec.json.encode(openapi.document()))
_BODY = {"$ref": "#/components/schemas/CreateBody", "components": _DOCUMENT["components"]}
_PROPERTIES = _DOCUMENT["components"]["schemas"]["CreateBody"]["properties"]
_LENGTHS = {
    name: field["anyOf"][0]["maxLength"] if "anyOf" in field else field["maxLength"]
    for name, field in _PROPERTIES.items()
    if "maxLength" in json.dumps(field) and not name.endswith("_email")
}
_OPTIONAL_TEXTS = ("customer_phone", "notes", "external_id")
# In UTF-8 of one to four bytes, and with a JSON escape of two, six or twelve.
_CHARACTERS = st.sampled_from(["a", '"', "\u00e9", "\u5c71", "\U0001f3e0"])
# Rules of addresses that a schema cannot express have their own test: tests/worker/mail/test_recipients.py.
_ADDRESSES = st.sampled_from(
    [
        "ada@example.com",
        "!#$%&'*+-/=?^_`{|}~@example.com",
        "a" * 64 + "@" + "b" * 63 + ".com",
        "ada@b\u00fccher.test",
    ]
)


def _large_meta_data(character: str) -> dict[str, Any]:
    """Return `meta_data` of the largest size and depth, filled with *character*."""
    value: Any = ""
    for _ in range(META_DATA_DEPTH - 1):
        value = {"a": value}
    room = META_DATA_BYTES - len(msgspec.json.encode({"a": value, "b": ""}))
    return {"a": value, "b": character * (room // (len(msgspec.json.encode(character)) - 2))}


def _long_texts(length: int) -> st.SearchStrategy[str]:
    return _CHARACTERS.map(lambda character: character * length)


_LARGEST: dict[str, st.SearchStrategy[Any]] = {name: _long_texts(length) for name, length in _LENGTHS.items()}
_LARGEST["meta_data"] = _CHARACTERS.map(_large_meta_data)
_LARGE: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {"customer_email": _ADDRESSES, "sender_email": _ADDRESSES}, optional=_LARGEST
)


def test_every_body_that_the_document_allows_is_stored(api, issuer):
    operation = schemathesis.openapi.from_dict(_DOCUMENT)["/v1/request"]["POST"]
    is_allowed = jsonschema_rs.Draft202012Validator(_BODY).is_valid
    headers = {"Authorization": f"Bearer {issuer.token()}", "Content-Type": "application/json"}

    @given(case=operation.as_strategy(), large=_LARGE, escapes=st.booleans())
    @settings(max_examples=_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def is_stored(case: Any, large: dict[str, Any], *, escapes: bool) -> None:
        body = case.body | large
        assert is_allowed(body)
        # No pattern in the document can exclude characters that are invisible and beyond U+FFFF.
        assume(
            not any(isinstance(text, str) and text and text_rules.is_blank(text) for text in body.values())
        )

        created = client.post("/v1/request", content=json.dumps(body, ensure_ascii=escapes))

        assert created.status_code == 200, created.text
        stored = client.get(f"/v1/request/{created.json()['data']['uuid']}").json()["data"]
        assert stored == created.json()["data"]
        assert stored == stored | expected(body)

    with httpx.Client(base_url=api.base_url, headers=headers, timeout=20.0) as client:
        is_stored()


def expected(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of *body* as the API returns them: null where left out, except for two defaults."""
    returned: dict[str, Any] = dict.fromkeys(_PROPERTIES)
    returned |= {"request_type": "SDLT_CALCULATION", "calculation_fee_exempt": False, **body}
    returned |= {name: returned[name] or None for name in _OPTIONAL_TEXTS}
    if not returned["calculation_fee_exempt"]:
        returned["calculation_fee_exempt_reason"] = None
    return returned
