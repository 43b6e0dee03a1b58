"""Child processes: started, watched, stopped, and ended by the next run if this process dies."""

import os
import signal
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.waiting import Stopping, never, wait_until

_KILL_SECONDS = 10.0
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A command, and how it is stopped."""

    name: str
    command: Sequence[str | Path]
    environment: Mapping[str, str]
    folder: Path
    log: Path
    pid_file: Path
    stop_signal: signal.Signals = signal.SIGTERM
    stop_seconds: float = 20.0


class Process:
    """A running program. Its own session keeps Ctrl-C from it: it is stopped in order instead."""

    def __init__(self, program: Program) -> None:
        self.program = program
        program.log.parent.mkdir(parents=True, exist_ok=True)
        program.log.write_bytes(b"")
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.program.log.open("ab") as log:
            process = subprocess.Popen(
                self.program.command,
                env=self.program.environment,
                cwd=self.program.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _remember(self.program.pid_file, process.pid, self.program.stop_signal)
        return process

    @property
    def pid(self) -> int:
        """The id of the process that runs now."""
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def restart(self) -> None:
        """Start the program again after its death. The log is continued."""
        self._process = self._start()

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
        """Return the end of the log."""
        return last_lines(self.program.log, count)

    def stop(self) -> None:
        """Stop it, or kill it if that takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(self.program.stop_signal)
            try:
                self._process.wait(self.program.stop_seconds)
            except subprocess.TimeoutExpired:
                _kill_group(self._process.pid)
                self._process.wait(_KILL_SECONDS)
        self.program.pid_file.unlink(missing_ok=True)


@contextmanager
def running(program: Program) -> Iterator[Process]:
    """Run *program* until the block is left."""
    process = Process(program)
    try:
        yield process
    finally:
        process.stop()


def run_command(
    name: str,
    command: Sequence[str | Path],
    *,
    environment: Mapping[str, str],
    folder: Path,
    seconds: float,
    stopping: Stopping = never,
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
        finished = wait_until(lambda: process.poll() is not None, seconds=seconds, stopping=stopping)
    finally:
        if process.poll() is None:
            _kill_group(process.pid)
        output, errors = process.communicate(timeout=_KILL_SECONDS)
    if not finished:
        raise LocalStackError(f"`{name}` did not end within {seconds:.0f} seconds.")
    if process.returncode != 0:
        raise LocalStackError(f"`{name}` failed:\n{_indented(errors.splitlines()[-8:])}")
    return output.strip()


def last_lines(log: Path, count: int = 8) -> str:
    """Return the end of a log, indented."""
    try:
        with log.open(errors="replace") as lines:
            return _indented(deque(lines, maxlen=count))
    except FileNotFoundError:
        return "    (no log)"


def _indented(lines: Sequence[str] | deque[str]) -> str:
    return "\n".join(f"    {line.rstrip()}" for line in lines if line.strip())


def end_leftovers(folder: Path) -> None:
    """End the processes that a dead run left behind, by the pid files in *folder*, and remove these files.

    The caller must hold the claim on the folder: then no living process is in charge of them.
    """
    for pid_file in sorted(folder.glob("*.pid")):
        lines = pid_file.read_text().splitlines()
        # Any other .pid file is the server's own.
        if len(lines) == 3 and all(number.isdecimal() for number in (lines[0], lines[2])):
            _end_leftover(int(lines[0]), lines[1], int(lines[2]))
            pid_file.unlink(missing_ok=True)


def identity(pid: int) -> str | None:
    """Return what distinguishes a process from others with the same id, or None if it has ended."""
    if not (_PROC / "self" / "stat").exists():
        return _started_at(pid)
    try:
        state, *fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A zombie has ended. Without a process that reaps orphans it stays listed forever.
    if state in "ZX":
        return None
    boot = (_PROC / "sys" / "kernel" / "random" / "boot_id").read_text().strip()
    return f"{boot} {fields[18]}"


def command_line(pid: int) -> str:
    """Return the command line of a process, or nothing if it has ended."""
    if (_PROC / "self").exists():
        with suppress(OSError):
            return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return ""
    return _ps(pid, "command")


def _started_at(pid: int) -> str | None:
    """Return the start time of a process on systems without /proc."""
    return _ps(pid, "lstart") or None


def _ps(pid: int, column: str) -> str:
    listing = subprocess.run(
        ["/bin/ps", "-o", f"{column}=", "-p", str(pid)],
        capture_output=True,
        text=True,
        check=False,
        timeout=10,
    )
    return listing.stdout.strip()


def _remember(pid_file: Path, pid: int, stop_signal: signal.Signals) -> None:
    pid_file.write_text(f"{pid}\n{identity(pid)}\n{int(stop_signal)}\n")


def _end_leftover(pid: int, known: str, stop_signal: int) -> None:
    if identity(pid) != known:
        return
    try:
        os.kill(pid, stop_signal)
    except ProcessLookupError:
        return
    except PermissionError:
        raise LocalStackError(
            f"Process {pid}, left behind by an earlier run, belongs to another user: ask them to end it."
        ) from None
    if not wait_until(lambda: identity(pid) != known, seconds=_KILL_SECONDS):
        _kill_group(pid)
        wait_until(lambda: identity(pid) != known, seconds=_KILL_SECONDS)


def _kill_group(pid: int) -> None:
    """Kill a child process and its process group."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
