"""The AsyncAPI document: valid, consistent with its examples, and equal to the committed one."""

import os
import shutil
import subprocess
from contextlib import nullcontext

import jsonschema_rs
import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.outbox import asyncapi, events
from service.outbox.events import CalculationCreated

COMMITTED = CHECKOUT / "deploy" / "asyncapi.json"
DOCUMENT = msgspec.to_builtins(asyncapi.document())
MESSAGES = DOCUMENT["components"]["messages"]
_NODE_MODULES = CHECKOUT / ".local" / "node" / "node_modules"


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


@pytest.mark.parametrize("message", MESSAGES)
def test_example_matches_its_schema(message):
    for example in MESSAGES[message]["examples"]:
        for part in example.keys() - {"name"}:
            schema_of(message, part).validate(example[part])


@pytest.mark.parametrize("event", events.SENT, ids=lambda event: event.type)
def test_schema_accepts_no_event_of_another_type(event):
    for other in events.SENT:
        payload = MESSAGES[other.type]["examples"][0]["payload"]

        assert schema_of(event.type, "payload").is_valid(payload) == (other is event)


@pytest.mark.parametrize(
    "calculation_id", ["", "calc_7\n", "two words", "line\nbreak", "\u0085", "x" * 256, "calc_7", "é/&"]
)
def test_schema_of_a_calculation_accepts_what_the_code_accepts(calculation_id):
    payload = {"request_uuid": "req_01a9ZkW3mT6qPxB8vNcR4d", "calculation_id": calculation_id}
    is_allowed = schema_of(asyncapi.BARE, "payload").is_valid(payload)

    with nullcontext() if is_allowed else pytest.raises(msgspec.ValidationError):
        msgspec.convert(payload, CalculationCreated)


def test_committed_document_matches_the_code():
    is_current = msgspec.json.decode(COMMITTED.read_bytes()) == DOCUMENT
    assert is_current, "run `make asyncapi`"
