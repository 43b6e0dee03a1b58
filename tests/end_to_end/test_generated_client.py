"""A client generated from the OpenAPI document works, also with a later release of the service."""

import subprocess
import sys
from importlib import import_module
from typing import Any

import msgspec
import pytest

from service import app
from service.identifiers import uuid_of
from service.outbox.events import SENT, event_id
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from tests.harness.processes import started

BODY = A_REQUEST | {"property_value": 300_000, "meta_data": {"source": "website"}}


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """The name of a client that openapi-python-client has generated, and which can be imported."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "openapi.json").write_bytes(msgspec.json.encode(app.describe()))
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
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "calculations_client"


def calls(generated: str, *names: str) -> list[Any]:
    return [import_module(f"{generated}.api.requests.{name}") for name in names]


async def test_generated_client_creates_repeats_and_reads(generated, api, issuer, database):
    models = import_module(f"{generated}.models")
    create, retrieve, events = calls(generated, "create_request", "retrieve_request", "list_events")
    client = import_module(generated).AuthenticatedClient(base_url=api.base_url, token=issuer.token())
    body = models.CreateBody.from_dict(BODY)
    wrong = models.CreateBody.from_dict(BODY | {"case_ref": "\u202e"})
    request = await stored.insert_with_each_event(database)
    async with started(api):
        with client:
            answers = [
                create.sync_detailed(client=client, body=body, idempotency_key=key)
                for key in ("key-1", "key-1", "key-2")
            ]
            created, repeated, another = (answer.parsed.data for answer in answers)
            refused = create.sync(client=client, body=wrong)
            retrieved = retrieve.sync(created.uuid, client=client)
            history = events.sync(request.uuid, client=client).data.events

    assert created.meta_data["source"] == "website"
    assert created.created_at.utcoffset() is not None
    assert created == repeated != another
    assert [answer.headers.get("Idempotent-Replayed") for answer in answers] == [None, "true", None]
    assert isinstance(refused, models.ErrorEnvelope)
    assert [error.code for error in refused.errors] == ["invalid_characters"]
    assert retrieved.data.to_dict() == created.to_dict()
    kinds = [f"{event.__name__}Event" for event in SENT]
    assert [type(event).__name__ for event in history] == [*kinds, "AnotherEvent"]
    failed = [event for event in history if isinstance(event, models.RequestEmailFailedEvent)]
    assert [event.data.reason for event in failed] == ["refused"]
    error = {"code": "added_later", "message": "", "field": None, "pointer": None}
    assert models.FieldError.from_dict(error).code == "added_later"


async def test_generated_client_misses_no_event_of_the_feed_over_a_restart(generated, api, issuer, database):
    (feed,) = calls(generated, "read_feed")
    ids: list[str] = []

    def read_on(after: Any) -> Any:
        """Read to the end in a new client, as after a restart, from what the last one kept."""
        made = import_module(generated).AuthenticatedClient(base_url=api.base_url, token=issuer.token())
        with made as client:
            while True:
                page = feed.sync(client=client, limit=2, after=after).data
                ids.extend(event.id for event in page.events)
                after = page.after
                if not page.more:
                    return after

    async with started(api):
        await stored.insert_with_each_event(database)
        after = read_on(import_module(f"{generated}.types").UNSET)
        await stored.insert_with_each_event(database)
        read_on(after)

    rows = await database.fetch("SELECT request_id, type, sequence FROM event")
    kept = [event_id(uuid_of(row["request_id"]), row["type"], row["sequence"]) for row in rows]
    assert sorted(ids) == sorted(kept)
