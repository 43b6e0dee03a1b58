"""Every process with its own users of Postgres and RabbitMQ, and with no secret but those that it uses."""

from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import fields
from yarl import URL

from deploy.local.machine.processes import run_command
from tests.deploy.manifests import OF_RABBITMQ, of_kind
from tests.end_to_end.callers import client_of
from tests.end_to_end.events import ALL_ARE_DONE, publish_calculation
from tests.harness import databases
from tests.harness.command_line import run
from tests.harness.examples import A_REQUEST
from tests.harness.processes import api_process, bare_environment, started, worker_process
from tests.harness.queues import holds, is_refused, read, write
from tests.harness.waiting import eventually
from worker.process import ROLES
from worker.rabbitmq import topology
from worker.rabbitmq.topology import CALCULATION_RESULTS, NOTIFICATIONS


def not_for(role: str) -> dict[str, str]:
    """Return the settings that a role does not get, unset."""
    of_role = {name: {each.encode_name for each in fields(ROLES[name].settings)} for name in ROLES}
    return dict.fromkeys(set().union(*of_role.values()) - of_role[role], "")


_A_USER = """
    rabbit_auth_backend_internal:add_user(<<"{name}">>, <<"made-up">>, <<"tests">>),
    rabbit_auth_backend_internal:set_permissions(
        <<"{name}">>, <<"/">>, <<"{configure}">>, <<"{write}">>, <<"{read}">>, <<"tests">>),
"""


@pytest.fixture(scope="module")
def broker_urls(broker_start):
    """The URL of each user of components/topology."""
    server = broker_start.result()
    if not server.client:
        pytest.skip("users cannot be made on a RabbitMQ that was given")
    permissions = {
        name: {may: pattern.replace("\\", r"\\") for may, pattern in one["spec"]["permissions"].items()}
        for name, one in of_kind("production", "Permission").items()
    }
    # One call: each starts an Erlang node.
    made = "".join(_A_USER.format(name=name, **may) for name, may in permissions.items())
    run_command("rabbitmqctl", [*server.client, "eval", f"{made} ok."], folder=Path("/"), seconds=60.0)
    server_url = URL(server.url).with_password("made-up")
    return {name: str(server_url.with_user(name)) for name in permissions}


async def test_chain_works_with_a_user_and_the_secrets_of_each_process(
    *, service_settings, worker_settings, broker_urls, database, channel, mail_server, issuer, tmp_path
):
    api = api_process(service_settings, tmp_path)
    workers = [
        worker_process(
            worker_settings, tmp_path, role, **{"AMQP_URL": broker_urls.get(role, ""), **not_for(role)}
        )
        for role in ROLES
    ]
    operator = bare_environment(
        AMQP_URL=broker_urls["operator"],
        DATABASE_URL=databases.as_role(service_settings.database_url, "operator"),
    )
    dead = CALCULATION_RESULTS.dead_letters
    async with started(api, *workers), client_of(api, issuer.token()) as caller:
        uuid = (await caller.post("/v1/request", json=A_REQUEST)).json()["data"]["uuid"]
        await eventually(lambda: mail_server.accepted)
        await write(channel, topology.CALCULATIONS, CALCULATION_RESULTS.routing_key)
        await eventually(lambda: holds(channel, dead, 1))
        redriven = await run(
            "worker", "dead-letters", "redrive", CALCULATION_RESULTS.name, environment=operator
        )
        await eventually(lambda: holds(channel, dead, 1))
        await publish_calculation(channel, uuid, "calc-1")
        await eventually(lambda: database.fetchval(ALL_ARE_DONE))

    assert redriven.output.startswith("1 of 1 messages moved")
    assert len(mail_server.accepted) == 1


@pytest.mark.usefixtures("channel")
@pytest.mark.parametrize("user", [*OF_RABBITMQ, "operator", "autoscaler"])
async def test_broker_refuses_a_user_what_its_process_does_not_do(broker_urls, user):
    reads = {"notifications": NOTIFICATIONS.name, "calculations": CALCULATION_RESULTS.name}.get(user)
    for queue in topology.QUEUES:
        if queue.name != reads:
            assert await is_refused(broker_urls[user], partial(read, queue=queue.name))
    assert await is_refused(broker_urls[user], lambda ours: ours.declare_queue("of-another-team"))
    assert await is_refused(broker_urls[user], lambda ours: ours.queue_delete(NOTIFICATIONS.name))
    consumers = {"notifications", "calculations"}
    writers = {
        topology.REQUESTS: {"relay"},
        topology.NOTIFICATIONS_ALONE: {"relay"},
        topology.DEAD_LETTERS: consumers,
    }
    for exchange in topology.EXCHANGES:
        if user not in writers.get(exchange, ()):
            assert await is_refused(broker_urls[user], partial(write, exchange=exchange))
