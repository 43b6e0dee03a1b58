"""A program of a mail system that starts others: killed with all of them, and started again."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from deploy.local.machine.ports import accepts
from deploy.local.machine.processes import Process, Program, wait_for
from deploy.local.machine.waiting import wait_until


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
        """Send SIGKILL to all of its processes, and wait until none listens: a new one could not start."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.stop()
        assert wait_until(lambda: not accepts(self.port), seconds=30, pause_seconds=0.01)

    def restart(self) -> None:
        """Start it again after `kill`, and wait until it listens."""
        self._process.restart()
        self.wait_until_it_listens()

    def wait_until_it_listens(self) -> None:
        wait_for(self._process, lambda: self.started in self.log and accepts(self.port), seconds=30)

    @property
    def log(self) -> str:
        """What it logged in all its lives."""
        return self._log.read_text() if self._log.exists() else ""


Daemon = TypeVar("Daemon", bound=MailDaemon)


@contextmanager
def running(start: Callable[[Path], Daemon]) -> Iterator[Daemon]:
    """Start it in a folder of its own, and run it until the block is left. Then print the end of its log."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)  # Its processes that are not root look for their files by name.
        server = start(Path(folder))
        try:
            server.wait_until_it_listens()
            yield server
        finally:
            server.kill()
            print("---", type(server).__name__, server.log[-4000:], sep="\n")  # noqa: T201
