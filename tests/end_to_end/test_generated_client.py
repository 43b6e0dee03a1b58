"""Clients that others generate from the OpenAPI document work, and are as typed as it is."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from service.authentication import api_keys
from service.contracts import openapi
from service.postgres.pool import Connection
from tests.harness.examples import CONVEYANCER
from tests.harness.issuer import Issuer
from tests.harness.processes import Process, started

_CALLER = """\
from calculations_client import AuthenticatedClient
from calculations_client.api.requests import create_request
from calculations_client.models import (
    CalculationRequestForm,
    CalculationRequestFormMetaDataType0,
    CalculationRequestRecord,
    EnvelopeCalculationRequestRecord,
    ErrorEnvelope,
    FieldErrorCode,
)


def form(case_ref: str) -> CalculationRequestForm:
    meta_data = CalculationRequestFormMetaDataType0()
    meta_data["source"] = "website"
    return CalculationRequestForm(
        customer_email="ada@customer.example.com",
        customer_first_name="Ada",
        customer_last_name="Lovelace",
        sender_email="grace@firm.example.com",
        sender_organization_name="Hopper & Partners",
        sender_first_name="Grace",
        sender_last_name="Hopper",
        case_ref=case_ref,
        property_value=300_000,
        meta_data=meta_data,
    )


def create(client: AuthenticatedClient, case_ref: str) -> CalculationRequestRecord | list[FieldErrorCode]:
    answer = create_request.sync(client=client, body=form(case_ref))
    match answer:
        case EnvelopeCalculationRequestRecord(data=record):
            return record
        case ErrorEnvelope(errors=errors):
            return [error.code for error in errors]
    raise TypeError(answer)
"""


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a client, fresh from openapi-python-client, and a module that calls it."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_bytes(msgspec.json.encode(openapi.document()))
    (folder / "caller.py").write_text(_CALLER)
    (folder / "configuration.json").write_text('{"post_hooks": []}')
    subprocess.run(
        [
            *(sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none"),
            *("--path", "openapi.json", "--output-path", "calculations_client"),
            *("--config", "configuration.json", "--fail-on-warning"),
        ],
        cwd=folder,
        check=True,
    )
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def caller(generated: Path) -> ModuleType:  # noqa: ARG001 - its fixture makes the module
    """The module that calls the client."""
    return importlib.import_module("caller")


async def test_generated_client_creates_and_retrieves(
    api: Process, issuer: Issuer, database: Connection, caller: ModuleType
) -> None:
    client = importlib.import_module("calculations_client")
    requests = importlib.import_module("calculations_client.api.requests.retrieve_request")
    questions = importlib.import_module("calculations_client.api.questionnaire.questionnaire_structure")
    key = await api_keys.create(database, CONVEYANCER)
    async with started(api):
        with client.AuthenticatedClient(base_url=api.base_url, token=issuer.token()) as authenticated:
            record = caller.create(authenticated, "12 High Street")
            refused = caller.create(authenticated, "\u202e")
            retrieved = requests.sync(record.uuid, client=authenticated)
            missing = requests.sync_detailed("req_none", client=authenticated)
        with client.AuthenticatedClient(base_url=api.base_url, token=key) as with_key:
            questionnaire = questions.sync(client=with_key)

    assert record.case_ref == "12 High Street"
    assert record.created_at.utcoffset() is not None
    assert record.meta_data["source"] == "website"
    assert retrieved.data == record
    assert refused == [caller.FieldErrorCode.INVALID_CHARACTERS]
    assert (missing.status_code, missing.parsed.errors[0].code) == (404, "not_found")
    assert questionnaire.data.questionnaire[0].ref == "case_ref"


def test_callers_of_the_generated_client_are_type_checked(generated: Path) -> None:
    strict = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file="]

    right = subprocess.run([*strict, "caller.py"], cwd=generated, capture_output=True, text=True, check=False)
    (generated / "wrong.py").write_text(_CALLER.replace("property_value=300_000", 'property_value="300000"'))
    wrong = subprocess.run([*strict, "wrong.py"], cwd=generated, capture_output=True, text=True, check=False)

    assert right.returncode == 0, right.stdout
    assert '"property_value"' in wrong.stdout
