"""A private Postgres with a standby that its commits wait for, or with a base backup that can be restored."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from yarl import URL

from deploy.local.machine.folders import Place
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Program, run_command, running
from deploy.local.servers.postgres_process import postgres_process, postgres_programs
from deploy.local.servers.server import trouble_of_postgres
from tests.harness import databases
from tests.harness.servers import KillableServer, scratch_folder
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually


@dataclass(frozen=True)
class Replicated:
    """A primary, and its standby behind a network of its own, with a database that has the schema."""

    primary: KillableServer
    primary_url: str
    standby_url: str
    network: TcpProxy

    @property
    def url(self) -> str:
        """The URL of the database for clients that follow a failover."""
        address = f"{URL(self.primary_url).authority},127.0.0.1:{URL(self.standby_url).port}"
        return f"postgresql://{address}{URL(self.primary_url).path}?target_session_attrs=read-write"

    async def cut_off(self) -> None:
        """Cut the standby off: from then on no commit ends."""
        await self.network.refuse()

    async def end_waits(self) -> None:
        """Cancel the waits of commits for the standby: Postgres keeps those commits."""
        ending = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        await _execute(self.primary_url, ending)

    async def admit(self) -> None:
        self.network.admit()
        in_step = "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')"
        async with databases.connected(self.primary_url) as administrator:
            await eventually(lambda: administrator.fetchval(in_step))

    async def fail_over(self) -> None:
        await self.primary.kill()
        await self.promote()

    async def promote(self) -> None:
        # It has no standby of its own, and waits for none.
        await _execute(self.standby_url, "SELECT pg_promote()")


@asynccontextmanager
async def replicated() -> AsyncIterator[Replicated]:
    with scratch_folder() as folder, ExitStack() as stack:
        primary = await _with_schema(stack, folder)
        async with TcpProxy(primary.url) as network:
            standby = await asyncio.to_thread(_copy_data, primary, network.url, "standby", "-R")
            port = free_port()
            command = list(standby.command)
            command[command.index("-p") + 1] = str(port)
            stack.enter_context(running(replace(standby, command=command)))
            await _set(primary.url, "synchronous_standby_names", "*")
            servers = Replicated(primary, primary.url, str(URL(primary.url).with_port(port)), network)
            await servers.admit()
            yield servers


@dataclass(frozen=True)
class Restorable:
    """A server with a base backup, and with a database that has the schema."""

    url: str
    server: KillableServer
    backup: Program
    stack: ExitStack  # ends what is started

    async def now(self) -> datetime:
        """Return a moment that is later than every commit so far, and earlier than every further one."""
        async with databases.connected(self.url) as administrator:
            return await administrator.fetchval("SELECT clock_timestamp()")

    async def restore(self, moment: datetime) -> None:
        """End the server, and recover the backup to *moment* in its place, under the same URL."""
        await self.server.kill()
        data = _data_of(self.backup)
        (data / "recovery.signal").touch()
        settings = {
            "restore_command": f"cp {data.with_name('data')}/pg_wal/%f %p",
            "recovery_target_time": moment.isoformat(),
            "recovery_target_action": "promote",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self.stack.enter_context(running(replace(self.backup, command=[*self.backup.command, *options])))
        await eventually(self._has_recovered)

    async def _has_recovered(self) -> bool:
        if trouble_of_postgres(self.url):
            return False
        async with databases.connected(self.url) as administrator:
            return not await administrator.fetchval("SELECT pg_is_in_recovery()")


@asynccontextmanager
async def restorable() -> AsyncIterator[Restorable]:
    with scratch_folder() as folder, ExitStack() as stack:
        server = await _with_schema(stack, folder)
        await _set(server.url, "wal_keep_size", "1GB")
        backup = await asyncio.to_thread(_copy_data, server, server.url, "backup")
        yield Restorable(server.url, server, backup, stack)


async def _with_schema(stack: ExitStack, folder: Path) -> KillableServer:
    server = KillableServer(stack.enter_context(postgres_process(Place(folder=folder))), trouble_of_postgres)
    async with databases.connected(server.url) as administrator:
        await databases.prepare(administrator)
    return server


async def _set(url: str, setting: str, value: str) -> None:
    await _execute(url, f"ALTER SYSTEM SET {setting} = '{value}'")
    await _execute(url, "SELECT pg_reload_conf()")


async def _execute(url: str, statement: str) -> None:
    async with databases.connected(url) as administrator:
        await administrator.execute(statement)


def _data_of(program: Program) -> Path:
    return Path(program.command[list(program.command).index("-D") + 1])


def _copy_data(primary: KillableServer, url: str, name: str, *options: str) -> Program:
    """Copy the data of a running server with pg_basebackup, over *url*. Returns the program of the copy."""
    program = primary.process.program
    command, data = list(program.command), _data_of(program)
    copy = data.with_name(name)
    copy.mkdir(mode=0o700)
    os.chown(copy, data.stat().st_uid, data.stat().st_gid)
    server = command.index(postgres_programs() / "postgres")
    usual = ("-D", copy, "-d", url, "-X", "stream", "-c", "fast", "--no-sync")
    run_command(
        "pg_basebackup",
        [*command[:server], postgres_programs() / "pg_basebackup", *usual, *options],
        environment=program.environment,
        folder=program.folder,
        seconds=60,
    )
    command[command.index("-D") + 1] = copy
    return replace(program, name=name, command=command, log=program.log.with_name(f"{name}.log"))
