"""`request correct` and `new-secret`: the old link is dead, and the right customer gets a new one."""

from collections.abc import Mapping

import httpx
import pytest

from service.identifiers import parse_uuid
from service.operations import operator_actions
from service.postgres.pool import Connection
from service.settings import ServiceSettings
from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST
from tests.harness.in_process import api_client, running
from tests.harness.mail_server import MailServer
from tests.harness.processes import Ended, bare_environment
from tests.harness.waiting import eventually
from tests.worker.conftest import open_postman
from tests.worker.operating.test_emails import assert_sound, states
from worker.mail import ledger
from worker.mail.ledger import Intent
from worker.settings import WorkerSettings


@pytest.fixture
def environment(service_settings: ServiceSettings) -> dict[str, str]:
    """The environment of an operator's commands on requests."""
    return bare_environment(
        DATABASE_URL=service_settings.database_url,
        APP_URL=service_settings.app_url,
        REQUEST_SECRET_KEYS=service_settings.request_secret_keys,
    )


@pytest.fixture
async def created(client: httpx.AsyncClient, database: Connection) -> dict[str, str]:
    """A request as it was answered to the firm; its e-mail is due."""
    answered: dict[str, str] = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    request_id = parse_uuid(answered["uuid"])
    assert request_id is not None
    await ledger.add(database, [Intent(first_key(answered), request_id)])
    return answered


def first_key(created: Mapping[str, str]) -> str:
    """Return the key of the first e-mail of a request."""
    return f"{created['uuid']}.request.created.1"


async def opens(settings: ServiceSettings, created: Mapping[str, str], secret: str) -> bool:
    """Whether a secret opens the request."""
    async with api_client(settings, None) as customer:
        answer = await customer.get(
            f"/v1/request/{created['uuid']}", headers={"Authorization": f"Bearer {secret}"}
        )
    assert answer.status_code in (200, 401)
    return answer.status_code == 200


async def settled(database: Connection, number: int) -> bool:
    """Whether this number of e-mails have ended."""
    return list((await states(database)).values()).count("sent") == number


async def test_corrected_customer_gets_a_new_link_and_the_old_one_is_dead(
    environment: Mapping[str, str],
    service_settings: ServiceSettings,
    client: httpx.AsyncClient,
    database: Connection,
    worker_settings: WorkerSettings,
    mail_server: MailServer,
    created: dict[str, str],
) -> None:
    async with open_postman(worker_settings) as postman, running(postman.run):
        await eventually(lambda: settled(database, 1))
        words = ("service", "request", "correct", created["uuid"], "--customer-email", "eve@example.com")
        ended = await run(*words, "--by", "Ada", "--reason", "typing error", environment=environment)
        await eventually(lambda: settled(database, 2))

    assert ended == Ended(0, f"{created['uuid']} corrected, with a new secret\n", "")
    wrong, right = mail_server.accepted
    assert (wrong.recipients, right.recipients) == ([created["customer_email"]], ["eve@example.com"])
    now = (await client.get(f"/v1/request/{created['uuid']}")).json()["data"]
    assert now["customer_email"] == "eve@example.com"
    assert now["secret"] != created["secret"]
    body = right.message.get_body(("plain",))
    assert body is not None
    assert now["request_url"] in body.get_content().splitlines()
    assert await opens(service_settings, created, now["secret"])
    assert not await opens(service_settings, created, created["secret"])
    request_id = parse_uuid(created["uuid"])
    assert request_id is not None
    [action] = await operator_actions.read(database, request_id)
    assert (action.action, action.operator, action.reason) == ("request correct", "Ada", "typing error")
    assert action.subject == f"{first_key(created)}.2"
    await assert_sound(database)


@pytest.mark.parametrize("claimed", [False, True])
async def test_email_that_is_pending_is_cancelled_and_replaced(
    environment: Mapping[str, str],
    database: Connection,
    created: dict[str, str],
    *,
    claimed: bool,
) -> None:
    if claimed:
        await database.execute("UPDATE email SET claimed_by = gen_random_uuid()")

    ended = await run("service", "request", "new-secret", created["uuid"], environment=environment)

    assert ended.status == 0
    assert await states(database) == {first_key(created): "failed", f"{first_key(created)}.2": "pending"}
    assert await database.fetchval("SELECT reason FROM email WHERE state = 'failed'") == "cancelled"


async def test_no_email_is_sent_on_demand(
    environment: Mapping[str, str],
    service_settings: ServiceSettings,
    database: Connection,
    created: dict[str, str],
) -> None:
    words = ("service", "request", "new-secret", created["uuid"], "--no-email")

    ended = await run(*words, environment=environment)

    assert ended == Ended(0, f"{created['uuid']} has a new secret\n", "")
    assert await states(database) == {first_key(created): "failed"}
    assert not await opens(service_settings, created, created["secret"])


async def test_first_email_has_the_corrected_address_if_it_has_not_begun(
    environment: Mapping[str, str],
    database: Connection,
    client: httpx.AsyncClient,
) -> None:
    created = (await client.post("/v1/request", json=A_REQUEST)).json()["data"]
    words = ("service", "request", "correct", created["uuid"], "--customer-email", "eve@example.com")

    ended = await run(*words, environment=environment)

    assert ended.status == 0
    assert await states(database) == {}  # request.created brings it about, once it is consumed.
    assert await database.fetchval("SELECT customer_email FROM calculation_request") == "eve@example.com"


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("new-secret", "req_0000000000000000000000"), "There is no such request."),
        (("new-secret", "1"), "not the uuid of a request"),
        (("correct", "req_0000000000000000000000", "--customer-email", "a@b@example.com"), "one recipient"),
        (
            ("correct", "req_0000000000000000000000", "--customer-email", "a" * 250 + "@b.com"),
            "one recipient",
        ),
    ],
)
async def test_wrong_argument_is_explained(
    environment: Mapping[str, str], database: Connection, *, words: tuple[str, ...], part: str
) -> None:
    ended = await run("service", "request", *words, environment=environment)

    assert (ended.status, ended.output) == (1, "")
    assert part in ended.errors
    assert len(ended.errors.splitlines()) == 1
    assert await database.fetchval("SELECT count(*) FROM operator_action") == 0
