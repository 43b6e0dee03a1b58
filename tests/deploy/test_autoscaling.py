"""The processes scale as the page says, by queries that work, and what they need then fits."""

import re

import pytest

from tests.deploy import manifests
from tests.deploy.manifests import PROCESSES, WITH_ENGINES, container_of, of_kind, the_one, workloads
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

    assert (before, due) == ((0, 0), 1)
    assert 40 <= age < 60


def test_triggers_have_no_misspelt_field_and_senders_are_also_counted_by_the_queue_that_they_read():
    """Their fields are in no schema: Kubernetes accepts any."""
    ((scaled, of_queue),) = triggers("rabbitmq").items()

    assert (scaled, of_queue["queueName"]) == ("notifications", topology.NOTIFICATIONS.name)
    assert of_queue.keys() == {"protocol", "host", "queueName", "mode", "value"}
    assert all(one.keys() == {"query", "targetQueryValue"} for one in triggers("postgresql").values())


@pytest.mark.parametrize(("column", "overlay"), list(enumerate(WITH_ENGINES, 1)))
def test_autoscalers_target_deployments_that_set_no_replicas_and_scale_as_the_page_says(column, overlay):
    deployments = of_kind(overlay, "Deployment")
    scalers = of_kind(overlay, "HorizontalPodAutoscaler", "ScaledObject").values()
    fixed = {name for name, deployment in deployments.items() if "replicas" in deployment["spec"]}
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in scalers}
    listed = rows(INSTALLATION, "Scaling", "| production")
    shown = {cells[0]: tuple(map(int, cells[column].split(" to "))) for cells in listed}

    assert len(scalers) == len(scaled)
    assert fixed == set(PROCESSES) - scaled, "replicas in deploy/k8s/base/workers.yaml, or an autoscaler"
    assert {name: (counts[0], counts[-1]) for name, counts in shown.items()} == manifests.replicas(overlay)


def requested(container: manifests.Manifest) -> tuple[float, float]:
    """Return the CPUs and the GiB that a container, or an engine for each of its pods, requests."""
    units = {"m": 0.001, "Mi": 1 / 1024, "Gi": 1, "": 1}
    requests = container["resources"]["requests"]
    (cpus,), (memory,) = (re.findall(r"^(\d+)(\w*)$", str(requests[name])) for name in ("cpu", "memory"))
    return float(cpus[0]) * units[cpus[1]], float(memory[0]) * units[memory[1]]


@pytest.mark.parametrize("overlay", ["external", *WITH_ENGINES])
def test_connections_fit_when_all_is_scaled_out_and_the_page_says_how_many_and_what_the_pods_request(overlay):
    page = " ".join(INSTALLATION.read_text().split())
    counts = manifests.replicas(overlay)
    of_process = {name: requested(container_of(workloads(overlay)[name])) for name in PROCESSES}
    pods = [(of_process[name], least) for name, (least, _) in counts.items()]
    for one in of_kind(overlay, "Cluster", "RabbitmqCluster", "Pooler").values():
        given = one["spec"]
        container = given["template"]["spec"]["containers"][0] if one["kind"] == "Pooler" else given
        pods.append((requested(container), given.get("instances") or given["replicas"]))
    cpus, memory = (sum(count * each[part] for each, count in pods) for part in (0, 1))
    surge = [sum(each[part] for each in of_process.values()) for part in (0, 1)]
    job = requested(container_of(workloads(overlay)["operator"]))
    # In a rollout there is one pod more of each process. Each API applies the schema before it starts.
    most = {name: most + 1 for name, (_, most) in counts.items()}
    sizes = {name: manifests.environment_of(overlay, name).get("DATABASE_POOL_SIZE") for name in most}
    pooled = sum(count * float(sizes[name] or 10) for name, count in most.items())
    beside_the_pools, operators = most["relay"] + most["api"], 5
    if overlay in WITH_ENGINES:
        pooler = the_one(overlay, "Pooler", "postgres-pooler")["spec"]
        parameters = pooler["pgbouncer"]["parameters"]
        postgresql = the_one(overlay, "Cluster", "postgres")["spec"]["postgresql"]
        allowed = postgresql["parameters"]["max_connections"]
        users = 3  # PgBouncer has a pool for each: the API's, the worker's, and in a rotation another one's.
        servers = pooler["instances"] * users * int(parameters["default_pool_size"])
        engine, keda = 15, len(of_kind(overlay, "ScaledObject"))
        # One PgBouncer may have to carry all of them.
        assert pooled <= int(parameters["max_client_conn"])
        assert servers + beside_the_pools + keda + operators + engine <= int(allowed)
    else:
        superusers = 3
        allowed = f"{pooled + beside_the_pools + operators + superusers:.0f}"
        assert f"{allowed} connections" in page

    listed = {cells[0]: cells[1:4] for cells in rows(INSTALLATION, "Scaling", "| CPUs")}
    assert listed[overlay] == [f"{cpus:.2f}", f"{memory:.1f} GiB", allowed], "deploy/README.md, Scaling"
    assert f"requests {surge[0]:.1f} CPUs and {surge[1] * 1024:.0f} MiB more" in page
    assert f"`operate` requests {job[0]} CPUs and {job[1] * 1024:.0f} MiB" in page
