"""A private RabbitMQ cluster of three nodes, which can be killed, frozen and cut off from each other."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from yarl import URL

from deploy.local.machine.folders import LOCAL, Place
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Program, running, wait_for
from deploy.local.servers.rabbitmq_node import find_programs, rabbitmq_node
from deploy.local.servers.server import Server, trouble_of_rabbitmq
from tests.harness.programs import skip_without
from tests.harness.servers import KillableBroker
from tests.harness.waiting import until

# RabbitMQ's operator for Kubernetes sets this. A node without a majority then closes its connections.
_SETTINGS = "cluster_partition_handling = pause_minority\n"
_TO_JOIN = """
cluster_formation.peer_discovery_backend = classic_config
cluster_formation.classic_config.nodes.1 = {first}
"""


class Node(KillableBroker):
    @property
    def name(self) -> str:
        return self.process.program.environment["RABBITMQ_NODENAME"]

    async def restart(self) -> None:
        """Stop it in order and start it again, as on Kubernetes: only once every queue can spare it."""
        await self.control("rabbitmq-upgrade await_online_quorum_plus_one --timeout 60")
        self.process.send_signal(signal.SIGTERM)
        await until(lambda: self.process.trouble() is not None, seconds=60.0)
        await self.start()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def cut_off(self, others: Sequence["Node"]) -> None:
        """Let it lose the *others*, and refuse every connection between them until `rejoin`."""
        await self._eval("erlang:set_cookie('{0}', apart), erlang:disconnect_node('{0}')", others)

    async def rejoin(self, others: Sequence["Node"]) -> None:
        """End `cut_off`, and wait until it serves clients again."""
        await self._eval("erlang:set_cookie('{0}', erlang:get_cookie())", others)
        await self.wait_for_answer()

    async def _eval(self, call: str, others: Sequence["Node"]) -> None:
        calls = ", ".join(call.format(other.name) for other in others)
        await self.control(f'rabbitmqctl eval "{calls}."')


@dataclass(frozen=True)
class Cluster:
    nodes: Sequence[Node]

    def others(self, node: Node) -> list[Node]:
        return [each for each in self.nodes if each is not node]

    async def leader(self, queue: str) -> Node:
        listed = await self.nodes[0].control("rabbitmqctl -q --no-table-headers list_queues name leader")
        name = dict(line.split() for line in listed.splitlines())[queue]
        return next(node for node in self.nodes if node.name == name)


def skip_without_programs() -> None:
    """Skip the test on a machine without RabbitMQ or Erlang's name server, and without Debian's packages."""
    with skip_without("RabbitMQ"):
        find_programs(Place(folder=LOCAL))


@contextmanager
def three_nodes(place: Place) -> Iterator[Cluster]:
    with rabbitmq_node(place, further_settings=_SETTINGS) as first, ExitStack() as stack:
        nodes = [Node(first, trouble_of_rabbitmq)]
        for number in (2, 3):
            program, url = _program_that_joins(nodes[0], number)
            joining = Server(url, process=stack.enter_context(running(program)))
            nodes.append(Node(joining, trouble_of_rabbitmq))
        for node in nodes:
            wait_for(node.process, lambda: not trouble_of_rabbitmq(node.url), seconds=150.0)  # noqa: B023
        yield Cluster(nodes)


def _program_that_joins(first: Node, number: int) -> tuple[Program, str]:
    """Return a node that shares the name server and the cookie of the *first*, and its URL."""
    program, url, port = first.process.program, URL(first.url), free_port()
    folder = program.folder / f"node-{number}"
    folder.mkdir()
    settings = (program.folder / "rabbitmq.conf").read_text().replace(f":{url.port}\n", f":{port}\n")
    (folder / "rabbitmq.conf").write_text(settings + _TO_JOIN.format(first=first.name))
    arguments = "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS"
    environment = {
        **program.environment,
        "RABBITMQ_NODENAME": f"node-{number}@localhost",
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        arguments: f"{program.environment[arguments]} +S 1",
    }
    log = folder / "rabbitmq.log"
    return replace(program, environment=environment, folder=folder, log=log), str(url.with_port(port))
