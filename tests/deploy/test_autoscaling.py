"""The autoscalers' queries work, and return what they scale on."""

from collections.abc import AsyncIterator

import pytest

from service.postgres.pool import Connection
from tests.deploy.manifests import WITH_ENGINES, Manifest, of_kind, replicas
from tests.deploy.pages import INSTALLATION, rows
from tests.harness import databases
from worker.rabbitmq import topology


def triggers(kind: str) -> list[tuple[str, Manifest]]:
    """Return the triggers of a kind, each with the process that it scales."""
    return [
        (name, trigger["metadata"])
        for name, scaled in of_kind("production", "ScaledObject").items()
        for trigger in scaled["spec"]["triggers"]
        if trigger["type"] == kind
    ]


def question(name: str) -> str:
    return str(dict(triggers("postgresql"))[name]["query"])


@pytest.fixture
async def autoscaler(database_url: str) -> AsyncIterator[Connection]:
    async with databases.connected(databases.as_role(database_url, "scaling")) as connection:
        yield connection


async def test_relays_are_counted_by_the_age_of_the_oldest_event(database, autoscaler):
    assert await autoscaler.fetchval(question("relay")) == 0

    await database.execute(
        """
        INSERT INTO outbox (request_id, sequence, created_at, next_attempt_at)
        SELECT gen_random_uuid(), 1, now() - age, now() + next
          FROM (VALUES ('15 s'::interval, NULL::interval), ('40 s', NULL), ('5 s', NULL), ('1 hour', '1 min'))
               AS event (age, next)
        """
    )

    assert 40 <= await autoscaler.fetchval(question("relay")) < 60


async def test_question_about_the_age_looks_into_the_index_only_once(autoscaler):
    await autoscaler.execute("SET enable_seqscan = off; SET enable_sort = off")

    plan = await autoscaler.fetch(f"EXPLAIN {question('relay')}")

    assert "using outbox_pending" in str(plan)
    assert "Sort" not in str(plan)


async def test_senders_are_counted_by_the_emails_that_are_due(database, autoscaler):
    assert await autoscaler.fetchval(question("notifications")) == 0

    await database.execute(
        """
        INSERT INTO email (request_id, number, kind, state, next_attempt_at)
        VALUES (gen_random_uuid(), 1, 'due', 'pending', now()),
               (gen_random_uuid(), 1, 'later', 'pending', now() + interval '1 hour'),
               (gen_random_uuid(), 1, 'sent', 'sent', now())
        """
    )

    assert await autoscaler.fetchval(question("notifications")) == 1


def test_senders_are_also_counted_by_the_queue_that_they_read():
    assert [(name, trigger["queueName"]) for name, trigger in triggers("rabbitmq")] == [
        ("notifications", topology.NOTIFICATIONS.name)
    ]


def test_no_trigger_has_a_misspelt_field():
    """Their fields are in no schema: Kubernetes accepts any."""
    fields = {"protocol", "host", "queueName", "mode", "value"}

    assert all(trigger.keys() == {"query", "targetQueryValue"} for _, trigger in triggers("postgresql"))
    assert all(trigger.keys() == fields for _, trigger in triggers("rabbitmq"))


def test_page_says_from_and_to_how_many_replicas_each_process_scales():
    listed = rows(INSTALLATION, "Scaling", "| production")

    for column, overlay in enumerate(WITH_ENGINES, 1):
        shown = {cells[0]: tuple(map(int, cells[column].split(" to "))) for cells in listed}
        assert {name: (counts[0], counts[-1]) for name, counts in shown.items()} == replicas(overlay)
