"""Settings that a session takes over from role, database or server: harmless, or refused by name."""

import pytest

from service.postgres import schema
from service.postgres.schema import SchemaOutdated
from tests.harness.command_line import run
from tests.harness.databases import connected, drop, url_of
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_and_probes
from tests.harness.processes import bare_environment

# Each has the value that differs most from the default.
_HARMLESS = {
    "DateStyle": "'SQL, DMY'",
    "IntervalStyle": "'sql_standard'",
    "TimeZone": "'Asia/Kathmandu'",
    "bytea_output": "'escape'",
    "client_encoding": "'LATIN1'",
    "default_transaction_deferrable": "on",
    "extra_float_digits": "-15",
    "idle_in_transaction_session_timeout": "'1s'",
    "idle_session_timeout": "'500ms'",
    "lock_timeout": "'5s'",
    "plan_cache_mode": "'force_generic_plan'",
    "row_security": "off",
    "session_replication_role": "replica",
    "standard_conforming_strings": "off",
    "statement_timeout": "'5s'",
    "synchronous_commit": "'remote_apply'",
}
_REFUSED = {
    "default_transaction_isolation": "serializable",
    "lock_timeout": "10",
    "statement_timeout": "4999",
    "synchronous_commit": "off",
}


async def set_default(database, name: str, value: str) -> None:
    own = await database.fetchval("SELECT quote_ident(current_database())")
    await database.execute(f"ALTER DATABASE {own} SET {name} = {value}")


async def test_harmless_settings_change_nothing_that_a_caller_sees(
    *, service_settings, issuer, database, environment
):
    for name, value in _HARMLESS.items():
        await set_default(database, name, value)

    async with api_and_probes(service_settings, issuer.token()) as (caller, probes):
        assert (await probes.get("/readyz")).status_code == 200
        body = A_REQUEST | {"case_ref": "Łukasz \\ '"}
        key = {"Idempotency-Key": "key"}
        made, again = [await caller.post("/v1/request", json=body, headers=key) for _ in range(2)]
        uuid = made.json()["data"]["uuid"]
        paths = (f"/v1/request/{uuid}", "/v1/request", f"/v1/request/{uuid}/events")
        read = [await caller.get(path) for path in paths]
    examined = await run("service", "doctor", environment=environment)

    assert [response.status_code for response in (made, again, *read)] == [200] * 5
    shown = made.json()["data"]
    assert again.json()["data"] == read[0].json()["data"] == shown
    assert shown["case_ref"] == body["case_ref"]
    assert examined.status == 0, examined.output


@pytest.mark.parametrize(("name", "value"), _REFUSED.items())
async def test_setting_that_would_break_us_is_refused_by_name(
    *, name, value, service_settings, database, database_url, environment
):
    await set_default(database, name, value)

    async with api_and_probes(service_settings, None) as (_, probes):
        ready = await probes.get("/readyz")
    examined = await run("service", "doctor", environment=environment)
    applied = await run("service", "schema", "apply", environment=bare_environment(DATABASE_URL=database_url))

    assert ready.status_code == 503
    for says in (ready.json()["postgres"], examined.output, applied.errors):
        assert f"Postgres has {name} = {value}" in says
    assert (examined.status, applied.status) == (1, 1)


async def test_database_of_another_encoding_is_refused_by_name(administrator, postgres_server):
    name, encoding = "of_sql_ascii", "SQL_ASCII"
    await administrator.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    url = url_of(postgres_server, name)

    applied = await run("service", "schema", "apply", environment=bare_environment(DATABASE_URL=url))
    async with connected(url) as connection:
        with pytest.raises(SchemaOutdated, match=encoding):
            await schema.check(connection)
    await drop(administrator, name)

    assert applied.errors == f"Postgres has server_encoding = {encoding}: choose UTF8 by CREATE DATABASE.\n"
