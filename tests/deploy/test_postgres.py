"""Postgres in production: its settings on a real server, its backups, and what it recovers from."""

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from tests.deploy.manifests import OURS, Manifest, rendered_upon_production, the_one
from tests.deploy.pages import OPERATING, code_blocks
from tests.harness import databases
from tests.harness.servers import scratch_folder

ADDRESS = "ada@customer.example.com"
# What the page adds to an overlay, and its patch with the archives of a second restore.
A_ROLE, A_RESTORE = code_blocks(OPERATING, "Backup and restore", "yaml")
A_SECOND_RESTORE = A_RESTORE.replace("value: postgres-2}", "value: postgres-3}")
A_SECOND_RESTORE = A_SECOND_RESTORE.replace("value: postgres}", "value: postgres-2}")


async def test_slow_statements_are_logged_without_personal_data_and_vanished_clients_are_noticed():
    parameters = the_one("production", "Cluster", "postgres")["spec"]["postgresql"]["parameters"]
    with scratch_folder() as folder, postgres_process(Place(folder=folder)) as server:
        async with databases.connected(server.url) as administrator:
            for name, value in parameters.items():
                await administrator.execute(f"ALTER SYSTEM SET {name} = '{value}'")
            await administrator.execute("SELECT pg_reload_conf()")
        async with databases.connected(server.url) as client:
            await client.fetch("SELECT $1::text, pg_sleep(1.1)", ADDRESS)
            idle, interval, count, unacknowledged = [
                int(await client.fetchval(f"SHOW tcp_{name}"))
                for name in ("keepalives_idle", "keepalives_interval", "keepalives_count", "user_timeout")
            ]
        log = server.last_lines()

    assert ("pg_sleep" in log, ADDRESS in log) == (True, False)
    assert (idle + interval * count, unacknowledged) == (60, 60_000)


def test_backups_are_kept_and_commits_wait_for_a_standby_as_the_page_says():
    cluster = the_one("production", "Cluster", "postgres")["spec"]
    backup = the_one("production", "ScheduledBackup", "postgres")["spec"]
    store = the_one("production", "ObjectStore", "postgres-backups")["spec"]
    of_commits = {"method": "any", "number": 1, "dataDurability": "required", "failoverQuorum": True}

    assert (cluster["instances"], cluster["postgresql"]["synchronous"]) == (3, of_commits)
    # Seconds come first. A new schedule makes a base backup at once.
    assert (backup["schedule"], backup["immediate"]) == ("0 0 2 * * *", True)
    assert store["retentionPolicy"] == "30d"


def test_roles_of_postgres_exist_before_the_schema_and_log_in_with_the_secrets_of_their_processes():
    cluster = the_one("production", "Cluster", "postgres")["spec"]
    roles = ("api", "worker", "operator", "scaling")
    made = {f"CREATE ROLE calculation_requests_{role}" for role in roles}

    assert set(cluster["bootstrap"]["initdb"]["postInitSQL"]) == made
    assert {role["name"]: role["passwordSecret"]["name"] for role in cluster["managed"]["roles"]} == {
        f"calculation_requests_{role}": f"postgres-{role}" for role in roles
    }


def archives(cluster: Manifest) -> tuple[str, str]:
    """Return the archive that a Cluster recovers from, and the one that it writes, in the same bucket."""
    recovery = cluster["bootstrap"]["recovery"]
    (source,) = (one["plugin"] for one in cluster["externalClusters"] if one["name"] == recovery["source"])
    of_production = the_one("production", "Cluster", "postgres")["spec"]
    (archiver,), (usual,) = cluster["plugins"], of_production["plugins"]
    assert archiver["isWALArchiver"] is True
    assert "serverName" not in usual["parameters"]  # It is the name of the Cluster.
    for one in (source, archiver):
        assert one["name"] == usual["name"]
        assert one["parameters"]["barmanObjectName"] == usual["parameters"]["barmanObjectName"]
    return source["parameters"]["serverName"], archiver["parameters"]["serverName"]


def test_database_is_recovered_up_to_the_moment_from_the_last_archive_and_writes_another(tmp_path):
    parts = {"first": [A_RESTORE, A_ROLE], "second": [A_SECOND_RESTORE]}
    parts["whole"] = [f"components: [{OURS}/components/restore]"]
    objects = {name: rendered_upon_production(*parts[name], folder=tmp_path / name) for name in parts}
    clusters = {name: objects[name]["Cluster postgres"]["spec"] for name in parts}
    usual, cluster = the_one("production", "Cluster", "postgres")["spec"], clusters["first"]
    changed = {"bootstrap", "externalClusters", "plugins", "serviceAccountTemplate"}

    assert archives(clusters["whole"]) == archives(clusters["first"]) == ("postgres", "postgres-2")
    assert archives(clusters["second"]) == ("postgres-2", "postgres-3")
    assert cluster["bootstrap"] == {
        "recovery": {
            **{name: usual["bootstrap"]["initdb"][name] for name in ("database", "owner")},
            "source": "archive",
            "recoveryTarget": {"targetTime": "2026-01-31T08:00:00Z"},
        }
    }
    assert {name: cluster[name] for name in cluster.keys() - changed} == {
        name: usual[name] for name in usual.keys() - changed
    }
    # The role takes the place of the bucket's keys.
    credentials = objects["first"]["ObjectStore postgres-backups"]["spec"]["configuration"]["s3Credentials"]
    account = cluster["serviceAccountTemplate"]["metadata"]["annotations"]
    assert (credentials, [*account]) == ({"inheritFromIAMRole": True}, ["eks.amazonaws.com/role-arn"])
