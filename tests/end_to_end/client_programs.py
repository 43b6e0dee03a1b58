"""A program of a firm: it calls the API with a generated client, and prints the answers."""

PYTHON = """
import json
import sys

from calculations_client import AuthenticatedClient
from calculations_client.api.questionnaire import questionnaire_structure
from calculations_client.api.requests import create_request, list_events, read_feed, retrieve_request
from calculations_client.models import CreateBody, FieldError, RequestEmailFailedEvent
from calculations_client.types import UNSET

base_url, token, sent, uuid = sys.argv[1:]
body = CreateBody.from_dict(json.loads(sent))
wrong = CreateBody.from_dict(json.loads(sent) | {"customer_email": "ada"})


def read_on(after):
    # Read the feed to its end, in a new client, as after a restart, from what the last one kept.
    with AuthenticatedClient(base_url=base_url, token=token) as client:
        while (page := read_feed.sync(client=client, limit=2, after=after).data).more:
            ids.extend(event.id for event in page.events)
            after = page.after
        ids.extend(event.id for event in page.events)
        return page.after


ids = []
after = read_on(UNSET)
with AuthenticatedClient(base_url=base_url, token=token) as client:
    created, repeated, another = [
        create_request.sync_detailed(client=client, body=body, idempotency_key=key)
        for key in ("key", "key", "another-key")
    ]
    read = retrieve_request.sync(created.parsed.data.uuid, client=client)
    questions = questionnaire_structure.sync(client=client)
    events = list_events.sync(uuid, client=client)
    error = create_request.sync(client=client, body=wrong)
read_on(after)
assert created.parsed.data == repeated.parsed.data != another.parsed.data
replayed = [each.headers.get("Idempotent-Replayed") for each in (created, repeated, another)]
assert replayed == [None, "true", None]
assert created.parsed.data.created_at.utcoffset() is not None
later = {"code": "added_later", "message": "", "field": None, "pointer": None}
assert FieldError.from_dict(later).code == "added_later"
failed = [event for event in events.data.events if isinstance(event, RequestEmailFailedEvent)]
answers = [each.to_dict() for each in (created.parsed, read, questions, events, error)]
kinds = [type(event).__name__ for event in events.data.events]
print(json.dumps([*answers, *(event.data.reason for event in failed), ids, kinds]))
"""
