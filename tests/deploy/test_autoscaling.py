"""The autoscalers' queries work, and return what they scale on."""

from tests.deploy.manifests import WITH_ENGINES, of_kind, replicas
from tests.deploy.pages import INSTALLATION, rows
from tests.harness import databases
from worker.rabbitmq import topology


def triggers(kind: str) -> dict[str, dict[str, str]]:
    """Return the trigger of a kind of each process that has one."""
    return {
        name: trigger["metadata"]
        for name, scaled in of_kind("production", "ScaledObject").items()
        for trigger in scaled["spec"]["triggers"]
        if trigger["type"] == kind
    }


async def test_relays_are_counted_by_the_age_of_the_oldest_event_and_senders_by_the_emails_that_are_due(
    database, database_url
):
    relays, senders = (triggers("postgresql")[name]["query"] for name in ("relay", "notifications"))
    async with databases.connected(databases.as_role(database_url, "scaling")) as autoscaler:
        before = await autoscaler.fetchval(relays), await autoscaler.fetchval(senders)
        await database.execute(
            """
            INSERT INTO outbox (request_id, sequence, created_at, next_attempt_at)
            SELECT gen_random_uuid(), 1, now() - age::interval, now() + next::interval
              FROM (VALUES ('15 s', NULL), ('40 s', NULL), ('5 s', NULL), ('1 hour', '1 min'))
                   AS event (age, next);
            INSERT INTO email (request_id, number, kind, state, next_attempt_at)
            VALUES (gen_random_uuid(), 1, 'due', 'pending', now()),
                   (gen_random_uuid(), 1, 'later', 'pending', now() + interval '1 hour'),
                   (gen_random_uuid(), 1, 'sent', 'sent', now())
            """
        )
        age, due = await autoscaler.fetchval(relays), await autoscaler.fetchval(senders)
        await autoscaler.execute("SET enable_seqscan = off; SET enable_sort = off")
        plan = str(await autoscaler.fetch(f"EXPLAIN {relays}"))

    assert (before, due) == ((0, 0), 1)
    assert 40 <= age < 60
    assert ("using outbox_pending" in plan, "Sort" in plan) == (True, False)


def test_triggers_have_no_misspelt_field_and_senders_are_also_counted_by_the_queue_that_they_read():
    """Their fields are in no schema: Kubernetes accepts any."""
    ((scaled, of_queue),) = triggers("rabbitmq").items()

    assert (scaled, of_queue["queueName"]) == ("notifications", topology.NOTIFICATIONS.name)
    assert of_queue.keys() == {"protocol", "host", "queueName", "mode", "value"}
    assert all(one.keys() == {"query", "targetQueryValue"} for one in triggers("postgresql").values())


def test_page_says_from_and_to_how_many_replicas_each_process_scales():
    listed = rows(INSTALLATION, "Scaling", "| production")

    for column, overlay in enumerate(WITH_ENGINES, 1):
        shown = {cells[0]: tuple(map(int, cells[column].split(" to "))) for cells in listed}
        assert {name: (counts[0], counts[-1]) for name, counts in shown.items()} == replicas(overlay)
