"""Private Postgres and RabbitMQ nodes, and mail daemons, which can be killed and started again.

Data that is thrown away is written without fsync. It survives the death of Postgres all the same: only
processes are killed here, never the machine, and their writes are in the page cache.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from yarl import URL

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Place
from deploy.local.machine.ports import accepts, free_port
from deploy.local.machine.processes import Process, Program, run_command, wait_for
from deploy.local.machine.waiting import wait_until
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.rabbitmq_node import rabbitmq_node
from deploy.local.servers.server import Server, trouble_of_postgres, trouble_of_rabbitmq
from tests.harness.waiting import until

_SECONDS = 60.0
_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder below it belongs to this user alone
_ROOM = 2 * 1024**3


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield where servers keep their data: in memory where there is room, else in .local.

    They make folders of their own in it, and remove those of runs that died.
    """
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _ROOM:
        yield LOCAL / "tests"
        return
    in_memory = _MEMORY / f"calculation-requests-tests-{os.getuid()}"
    with suppress(FileExistsError):  # `exist_ok` fails if another process removes the folder at this moment.
        in_memory.mkdir(mode=0o700)
    try:
        yield in_memory
    finally:
        with suppress(OSError):  # Another process uses it.
            in_memory.rmdir()


class KillableServer:
    def __init__(self, server: Server, trouble_at: Callable[[str], str | None]) -> None:
        assert server.process is not None, "a server in a container cannot be killed like this"
        self.url, self.process, self._trouble_at = server.url, server.process, trouble_at

    @property
    def is_up(self) -> bool:
        return accepts(URL(self.url).port or 0)

    async def kill(self) -> None:
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
        if not await until(self.answers, seconds=_SECONDS):
            raise LocalStackError(self.process.describe("It does not answer again."))


class KillableBroker(KillableServer):
    """A RabbitMQ node, which can also raise its memory alarm."""

    async def control(self, command: str) -> str:
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
    with ExitStack() as stack:
        postgres = KillableServer(stack.enter_context(postgres_process(place)), trouble_of_postgres)
        broker = KillableBroker(stack.enter_context(rabbitmq_node(place)), trouble_of_rabbitmq)
        yield Servers(postgres, broker, postgres.url, broker.url)


@contextmanager
def mail_catcher(folder: Path) -> Iterator[int]:
    """Run the mail server of `make run`, which writes accepted mail to *folder*; yields its port."""
    port = free_port()
    process = subprocess.Popen([sys.executable, "-m", "deploy.local.mail_catcher", str(port), str(folder)])
    try:
        assert wait_until(lambda: accepts(port), seconds=30)
        yield port
    finally:
        process.terminate()
        process.wait(30)


class MailDaemon:
    """Runs a command that accepts connections on `port`, and logs `started` to `log_file` at first."""

    port: int
    log_file: str  # in the folder of the server
    started: str

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self._log = folder / self.log_file
        name, output = type(self).__name__, folder / "output"
        program = Program(name=name, command=command, environment=environment, folder=folder, log=output)
        self._process = Process(program)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stop()
        assert wait_until(lambda: not accepts(self.port), seconds=30, pause_seconds=0.01)

    def restart(self) -> None:
        self._process.restart()
        self.wait_until_it_listens()

    def wait_until_it_listens(self) -> None:
        wait_for(self._process, lambda: self.started in self.log and accepts(self.port), seconds=30)

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


Daemon = TypeVar("Daemon", bound=MailDaemon)


@contextmanager
def running_daemon(start: Callable[..., Daemon], *arguments: Any, **settings: str) -> Iterator[Daemon]:
    """Start it in a folder of its own, and run it until the block is left. Then print the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # Its processes that are not root look for their files by name.
        server = start(Path(folder), *arguments, **settings)
        try:
            server.wait_until_it_listens()
            yield server
        finally:
            server.kill()
            print("---", type(server).__name__, server.log[-4000:], sep="\n")  # noqa: T201


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
