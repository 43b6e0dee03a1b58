"""The lines about a request in the log of the API: each leads to the request and to the call."""

import httpx
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from service.postgres.pool import Connection
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client, served

READER = "calculations-team"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


async def test_every_line_about_a_request_has_its_uuid_and_the_trace_of_the_call(
    service_settings, issuer, database
):
    async with api_client(
        service_settings, issuer.token(), auth_internal_clients=READER, database_timeout_seconds=0.5
    ) as client:
        record = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
        path = f"/v1/request/{record['uuid']}"
        client.headers["traceparent"] = f"00-{TRACE_ID}-b7ad6b7169203331-01"
        with capture_logs([merge_contextvars]) as logs:
            await get(client, path, token=issuer.token(READER, scope="request:read-all"))
            await lose_key(database, "lost")
            await get(client, path)
            await database.execute("ALTER TABLE calculation_request RENAME notes TO remarks")
            await get(client, path)
            async with database.transaction():
                await database.execute("LOCK TABLE calculation_request")
                await get(client, path)

    assert {line["event"] for line in logs} == {
        "request_read_internally",
        "request_failed",
        "request_turned_away",
        "request_served",
    }
    assert {line["trace_id"] for line in logs} == {TRACE_ID}
    assert {line.get("uuid") for line in logs if line.get("route") != "/v1/request"} == {record["uuid"]}


async def get(client: httpx.AsyncClient, path: str, *, token: str = "") -> None:
    """Ask for something, with a token of its own if given."""
    await client.get(path, headers={"Authorization": f"Bearer {token}"} if token else {})


async def lose_key(database: Connection, key_id: str) -> None:
    """Let the secrets of all requests need a key that the API does not have."""
    await database.execute("UPDATE calculation_request SET secret_key_id = $1", key_id)


async def test_line_of_a_401_has_the_reason(service_settings, issuer):
    async with api_client(service_settings, issuer.token(exp=1)) as client:
        with capture_logs() as logs:
            answer = await client.get("/v1/request")

    assert answer.status_code == 401
    reasons = [line["reason"] for line in served(logs)]
    assert reasons == [answer.json()["errors"][0]["message"]]
    assert "expired" in reasons[0]
