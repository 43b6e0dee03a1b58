"""Child processes: started, watched and stopped. They end when this process does, however it ends."""

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import held_locks
from deploy.local.machine.waiting import trouble_before, wait_until

_KILL_SECONDS = 10.0
# Waits for a line from this process. If its standard input ends without one, this process has died.
_GUARD = 'read -r line || { kill -s "$1" -- "-$2"; sleep "$3"; kill -s KILL -- "-$2"; }'


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command, and how it is stopped."""

    name: str
    command: Sequence[str | Path]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 30.0


class Process:
    """A running program. Its own session keeps Ctrl-C from it: it is stopped in order instead.

    It inherits the claims on folders: they are free once nothing of a run that died is left.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        program.log.parent.mkdir(parents=True, exist_ok=True)
        program.log.write_bytes(b"")
        self.starts = deque([float("-inf")] * 5, maxlen=5)  # the times of its last starts
        self._start()

    def _start(self) -> None:
        program = self.program
        self.starts.append(time.monotonic())
        with program.log.open("ab") as log:
            self._process = subprocess.Popen(
                program.command,
                env=program.environment,
                cwd=program.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=held_locks,
            )
        signal_name = program.stop_signal.name.removeprefix("SIG")
        arguments = ("sh", signal_name, str(self.pid), f"{program.stop_seconds:.0f}")
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, *arguments],  # noqa: S607 - the sh of this machine
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The id of the process that runs now."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def restart(self) -> None:
        """Start the program again after its death. The log is continued."""
        self.stop()
        self._start()

    @property
    def exit_status(self) -> int | None:
        """The exit status, or minus the signal that killed it. None while it runs."""
        return self._process.poll()

    def trouble(self) -> str | None:
        """Return how it died, or None while it runs."""
        status = self.exit_status
        if status is None:
            return None
        name = self.program.name
        if status < 0:
            return f"The {name} was killed by {signal.Signals(-status).name}."
        return f"The {name} exited with status {status}."

    def describe(self, trouble: str) -> str:
        """Return *trouble* with the path and the last lines of the log."""
        return f"{trouble} The end of {self.program.log}:\n{self.last_lines(8)}"

    def last_lines(self, count: int = 40) -> str:
        """Return the end of the log, indented."""
        with self.program.log.open(errors="replace") as lines:
            return _indented(deque(lines, maxlen=count))

    def stop(self) -> None:
        """Stop it, or kill it if that takes too long. Stopping it again changes nothing."""
        if self._process.poll() is None:
            self._process.send_signal(self.program.stop_signal)
            try:
                self._process.wait(self.program.stop_seconds)
            except subprocess.TimeoutExpired:
                _kill_group(self._process.pid)
                self._process.wait(_KILL_SECONDS)
        if self._guard.returncode is None:
            self._guard.communicate(b"\n")


@contextmanager
def running(program: Program) -> Iterator[Process]:
    """Run *program* until the block is left."""
    process = Process(program)
    try:
        yield process
    finally:
        process.stop()


def wait_for(process: Process, condition: Callable[[], bool], *, seconds: float) -> None:
    """Wait until *condition* is true. Raises LocalStackError if the process dies, or it takes too long."""
    if trouble := trouble_before(condition, process.trouble, seconds=seconds):
        raise LocalStackError(process.describe(trouble))


def run_command(
    name: str,
    command: Sequence[str | Path],
    *,
    folder: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a command to its end and return its output. Raises LocalStackError if it fails."""
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    try:
        finished = wait_until(lambda: process.poll() is not None, seconds=seconds)
    finally:
        if process.poll() is None:
            _kill_group(process.pid)
        output, errors = process.communicate(timeout=_KILL_SECONDS)
    if not finished:
        raise LocalStackError(f"`{name}` did not end within {seconds:.0f} seconds.")
    if process.returncode != 0:
        raise LocalStackError(f"`{name}` failed:\n{_indented(errors.splitlines()[-8:])}")
    return output.strip()


def _indented(lines: Sequence[str] | deque[str]) -> str:
    return "\n".join(f"    {line.rstrip()}" for line in lines if line.strip())


def _kill_group(pid: int) -> None:
    """Kill a child process and its process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
