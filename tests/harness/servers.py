"""Private Postgres and RabbitMQ nodes, which can be killed and started again.

Data that is thrown away is written without fsync. It survives the death of Postgres all the same: only
processes are killed here, never the machine, and their writes are in the page cache.
"""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from yarl import URL

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import run_command
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import Server, trouble_of_postgres, trouble_of_rabbitmq
from tests.harness.waiting import until

_SECONDS = 60.0


class KillableServer:
    def __init__(self, server: Server, trouble_at: Callable[[str], str | None]) -> None:
        assert server.process is not None, "a server in a container cannot be killed like this"
        self.url, self.process, self._trouble_at = server.url, server.process, trouble_at

    @property
    def is_up(self) -> bool:
        """Whether it accepts connections."""
        return accepts(URL(self.url).port or 0)

    async def kill(self) -> None:
        """Send SIGKILL to the server and all its children."""
        for pid in (self.process.pid, *children(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await until(lambda: self.process.trouble() is not None, seconds=_SECONDS, pause_seconds=0.01)

    async def answers(self) -> bool:
        return await asyncio.to_thread(self._trouble_at, self.url) is None

    async def start(self) -> None:
        self.process.restart()
        await self.wait_for_answer()

    async def wait_for_answer(self) -> None:
        """Wait until it answers. Raises LocalStackError."""
        if not await until(self.answers, seconds=_SECONDS):
            raise LocalStackError(self.process.describe("It does not answer again."))


class KillableBroker(KillableServer):
    """A RabbitMQ node, which can also raise its memory alarm."""

    async def control(self, command: str) -> str:
        """Run one of RabbitMQ's command-line tools on it, and return what it prints."""
        return await asyncio.to_thread(run_as_operator, command, self)

    async def raise_memory_alarm(self) -> None:
        await self.control("rabbitmqctl set_vm_memory_high_watermark absolute 1MB")

    async def clear_memory_alarm(self) -> None:
        await self.control("rabbitmqctl set_vm_memory_high_watermark 0.4")


@dataclass(frozen=True)
class Servers:
    """One of each, and where clients find them."""

    postgres: KillableServer
    broker: KillableBroker
    postgres_url: str
    broker_url: str


@contextmanager
def private_servers(place: Place) -> Iterator[Servers]:
    """Start both on free ports of the loopback, in the folder of *place*."""
    with ExitStack() as stack:
        postgres = KillableServer(stack.enter_context(postgres_process(place)), trouble_of_postgres)
        broker = KillableBroker(stack.enter_context(rabbitmq_node(place)), trouble_of_rabbitmq)
        yield Servers(postgres, broker, postgres.url, broker.url)


def run_as_operator(commands: str, broker: Server | KillableBroker, **environment: str) -> str:
    """Run shell *commands*, with the command-line tools of *broker*. Returns what they print."""
    assert broker.process is not None
    program = broker.process.program
    # Not the rabbitmqctl on Debian's PATH: that one insists on running as another user.
    path = f"{Path(program.command[0]).parent}:{program.environment['PATH']}"
    return run_command(
        "rabbitmqctl",
        ["sh", "-euc", commands],
        environment={**program.environment, "PATH": path, **environment},
        folder=program.folder,
        seconds=_SECONDS,
    )


def enable_plugin(plugin: str, broker: Server | KillableBroker) -> int:
    """Enable a plugin that serves HTTP, for good, and return its port on the loopback."""
    port = free_port()
    # The address is set first: otherwise it would listen on every interface, always on the same port.
    address = f'[{{ip, "127.0.0.1"}}, {{port, {port}}}]'
    setting = f"application:set_env({plugin}, tcp_config, {address})."
    run_as_operator(f"rabbitmqctl eval '{setting}'\nrabbitmq-plugins enable {plugin}", broker)
    return port


def children(pid: int) -> list[int]:
    """Return the children of a process; none on systems without /proc."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []
