"""Events are documented. The AsyncAPI document is valid, committed, and breaks nobody who built on the last.

`released_asyncapi.json` is deploy/asyncapi.json as the last release had it: each release copies it. Today's
document may add fields, messages, channels and operations, and may use other descriptions and examples.
"""

import copy
import operator
import os
import re
import shutil
import subprocess
from contextlib import nullcontext
from functools import reduce
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.outbox import asyncapi, events
from service.outbox.events import CalculationCreated, DetailedRequestEvent, RequestCreated
from tests.deploy.pages import WORKER, section

DOCUMENT: dict[str, Any] = msgspec.to_builtins(asyncapi.document())
RELEASED = msgspec.json.decode((Path(__file__).parent / "released_asyncapi.json").read_bytes())
MESSAGES = DOCUMENT["components"]["messages"]
_NODE_MODULES = CHECKOUT / ".local" / "node" / "node_modules"
GONE = object()
DESCRIPTIVE = {"description", "examples", "info", "summary", "title"}
NAMED = {"channels", "messages", "operations", "properties", "schemas"}  # Their members have names of ours.
SENT = "components/schemas/RequestCalculated"
RECEIVED = "components/schemas/CalculationCreated"
PAGE = section(WORKER, "Events")


def schema_of(message: str, part: str) -> jsonschema_rs.Draft202012Validator:
    """Return a validator of the headers or the payload of a message."""
    schema = {**MESSAGES[message][part], "components": DOCUMENT["components"]}
    return jsonschema_rs.Draft202012Validator(schema, validate_formats=True)


def test_document_is_valid(tmp_path):
    """AsyncAPI's own parser, in node, finds no error in the document.

    Of two packages on PyPI, `pydantic-asyncapi` refuses valid AMQP channels and `asyncapi3` is new.
    """
    node = shutil.which("node")
    if node is None or not (_NODE_MODULES / "@asyncapi" / "parser").exists():
        pytest.skip("AsyncAPI's parser is not installed: `make deploy-check` installs it if there is node")
    file = tmp_path / "asyncapi.json"
    file.write_bytes(msgspec.json.encode(DOCUMENT))
    checked = subprocess.run(
        [node, CHECKOUT / "deploy" / "node" / "check-asyncapi.cjs", file],
        env={**os.environ, "NODE_PATH": str(_NODE_MODULES)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_committed_document_matches_the_code():
    committed = msgspec.json.decode((CHECKOUT / "deploy" / "asyncapi.json").read_bytes())
    is_current = committed == DOCUMENT
    assert is_current, "run `make asyncapi`"


@pytest.mark.parametrize("message", MESSAGES)
def test_example_matches_its_schema_and_no_event_that_of_another_type(message):
    for example in MESSAGES[message]["examples"]:
        for part in example.keys() - {"name"}:
            schema_of(message, part).validate(example[part])
    for other in {event.type for event in events.SENT} - {message}:
        payload = MESSAGES[other]["examples"][0]["payload"]
        assert not schema_of(message, "payload").is_valid(payload), other


def test_schema_of_a_calculation_accepts_what_the_code_accepts():
    for text in ("", "calc_7\n", "two words", "line\nbreak", "\u0085", "x" * 256, "calc_7", "é/&"):
        payload = {"request_uuid": "req_01a9ZkW3mT6qPxB8vNcR4d", "calculation_id": text}
        is_allowed = schema_of(asyncapi.BARE, "payload").is_valid(payload)
        with nullcontext() if is_allowed else pytest.raises(msgspec.ValidationError):
            msgspec.convert(payload, CalculationCreated)


@pytest.mark.parametrize("event", events.SENT, ids=lambda event: event.type)
def test_event_is_documented(event):
    """Each of its fields has an example, and the page names it."""
    own = set(event.__struct_fields__) - set(DetailedRequestEvent.__struct_fields__)
    row = re.search(rf"^\| `{event.type}` \|.*$", PAGE, re.MULTILINE)

    without = set(event.__struct_fields__) - {*asyncapi.examples_in(event), "sequence"}
    assert without == set(), "without an example in events.py"
    assert row, "worker/README.md, Events"
    assert own <= set(re.findall(r"`(\w+)`", row[0]))


def test_page_names_the_fields_of_all_events_and_shows_one_as_it_is_sent():
    (named,) = re.findall(r"`data` holds (.*?), and nothing personal", PAGE, re.DOTALL)
    (shown,) = re.findall("```json\n(.*?)```", PAGE, re.DOTALL)

    fields = list(DetailedRequestEvent.__struct_fields__)
    assert re.findall(r"`(\w+)`", named) == fields, "worker/README.md, Events"
    (created,) = (each for each in asyncapi.SENT_EXAMPLES if isinstance(each, RequestCreated))
    assert msgspec.json.decode(shown)["data"] == msgspec.to_builtins(created), "worker/README.md, Events"


def breaks(old: Any, new: Any, path: str = "", *, is_named: bool = False) -> list[str]:
    """Return the paths at which *new* is not *old* with additions."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        return [] if old == new else [path]
    added = set() if is_named else new.keys() - old.keys() - DESCRIPTIVE
    found = [f"{path}/{key}" for key in added]
    for key, part in old.items():
        if is_named or key not in DESCRIPTIVE:
            has_names = key in NAMED and not is_named
            found += breaks(part, new.get(key, GONE), f"{path}/{key}", is_named=has_names)
    return found


def test_events_do_not_break_who_built_on_the_released_ones():
    assert breaks(RELEASED, DOCUMENT) == [], "a new field of an event needs a default"


def test_breaking_change_is_found_and_an_addition_is_none():
    breaking: dict[str, Any] = {
        f"{SENT}/properties/external_id": GONE,
        f"{SENT}/properties/uuid/type": "integer",
        f"{SENT}/required": ["uuid"],
        f"{RECEIVED}/required": ["request_uuid", "calculation_id", "added"],
        "channels/request.created/bindings/amqp/exchange/durable": False,
        "operations/send_request_calculated": GONE,
        "components/messages/calculation.created/headers": {"required": ["id"]},
    }
    for path, value in (breaking | {f"{SENT}/properties/added": {"type": "string"}}).items():
        changed = copy.deepcopy(DOCUMENT)
        *steps, last = path.split("/")
        part = reduce(operator.getitem, steps, changed)
        part[last] = value
        if value is GONE:
            del part[last]
        assert breaks(DOCUMENT, changed) == ([f"/{path}"] if path in breaking else [])
