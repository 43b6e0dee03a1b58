"""The settings of Postgres in production, on a real server."""

import asyncpg

from deploy.local.machine.folders import Place
from deploy.local.servers.postgres_process import postgres_process
from tests.deploy.manifests import the_one
from tests.harness import scratch

ADDRESS = "ada@customer.example.com"


async def test_slow_statements_are_logged_without_personal_data_and_vanished_clients_are_noticed():
    parameters = the_one("production", "Cluster", "postgres")["spec"]["postgresql"]["parameters"]
    with (
        scratch.folder() as folder,
        postgres_process(Place(folder=folder, keep=False, report=print)) as server,
    ):
        administrator = await asyncpg.connect(server.url)
        for name, value in parameters.items():
            await administrator.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        await administrator.execute("SELECT pg_reload_conf()")
        await administrator.close()
        client = await asyncpg.connect(server.url)
        await client.fetch("SELECT $1::text, pg_sleep(1.1)", ADDRESS)
        silence = await client.fetchval(
            """
            SELECT current_setting('tcp_keepalives_idle')::integer
                   + current_setting('tcp_keepalives_interval')::integer
                   * current_setting('tcp_keepalives_count')::integer
            """
        )
        unacknowledged = await client.fetchval("SHOW tcp_user_timeout")
        await client.close()
        log = server.last_lines()

    assert "pg_sleep" in log
    assert ADDRESS not in log
    assert (silence, unacknowledged) == (60, "60000")
