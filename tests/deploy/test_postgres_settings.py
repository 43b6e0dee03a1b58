"""The settings of Postgres in production, on a real server."""

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from tests.deploy.manifests import the_one
from tests.harness import databases, scratch

ADDRESS = "ada@customer.example.com"


async def test_slow_statements_are_logged_without_personal_data_and_vanished_clients_are_noticed():
    parameters = the_one("production", "Cluster", "postgres")["spec"]["postgresql"]["parameters"]
    with scratch.folder() as folder, postgres_process(Place(folder=folder)) as server:
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

    assert "pg_sleep" in log
    assert ADDRESS not in log
    assert (idle + interval * count, unacknowledged) == (60, 60_000)


def test_backups_are_kept_and_commits_wait_for_a_standby_as_the_page_says():
    cluster = the_one("production", "Cluster", "postgres")["spec"]
    backup = the_one("production", "ScheduledBackup", "postgres")["spec"]
    store = the_one("production", "ObjectStore", "postgres-backups")["spec"]

    assert cluster["instances"] == 3
    assert cluster["postgresql"]["synchronous"] == {
        "method": "any",
        "number": 1,
        "dataDurability": "required",
        "failoverQuorum": True,
    }
    assert backup["schedule"] == "0 0 2 * * *"  # seconds come first
    assert store["retentionPolicy"] == "30d"
