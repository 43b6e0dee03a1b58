"""A private Postgres with a standby that its commits wait for, which can be cut off and promoted."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from yarl import URL

from deploy.local.machine.folders import Place
from deploy.local.machine.ports import free_port
from deploy.local.machine.processes import Program, run_command, running
from deploy.local.servers.postgres_process import postgres_process, postgres_programs
from deploy.local.servers.server import trouble_of_postgres
from tests.harness import databases, scratch
from tests.harness.servers import KillableServer
from tests.harness.tcp_proxy import TcpProxy
from tests.harness.waiting import eventually

_COPY_SECONDS = 60


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
        async with databases.connected(self.primary_url) as administrator:
            await administrator.execute(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
            )

    async def admit(self) -> None:
        self.network.admit()
        in_step = "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')"
        async with databases.connected(self.primary_url) as administrator:
            await eventually(lambda: administrator.fetchval(in_step))

    async def fail_over(self) -> None:
        await self.primary.kill()
        await self.promote()

    async def promote(self) -> None:
        async with databases.connected(self.standby_url) as standby:
            await standby.execute("SELECT pg_promote()")  # It has no standby of its own, and waits for none.


@asynccontextmanager
async def replicated() -> AsyncIterator[Replicated]:
    """Start both servers on free ports of the loopback."""
    with scratch.folder() as folder, ExitStack() as stack:
        place = Place(folder=folder)
        primary = KillableServer(stack.enter_context(postgres_process(place)), trouble_of_postgres)
        async with TcpProxy(primary.url) as network:
            async with databases.connected(primary.url) as administrator:
                await databases.prepare(administrator)
                port = await _start_standby(stack, primary, network)
                await administrator.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
                await administrator.execute("SELECT pg_reload_conf()")
            servers = Replicated(primary, primary.url, str(URL(primary.url).with_port(port)), network)
            await servers.admit()
            yield servers


async def _start_standby(stack: ExitStack, primary: KillableServer, network: TcpProxy) -> int:
    """Copy the primary's data, and start a standby that streams over *network*. Returns its port."""
    program = await asyncio.to_thread(copy_data, primary, network.url, "standby", "-R")
    port = free_port()
    command = list(program.command)
    command[command.index("-p") + 1] = str(port)
    stack.enter_context(running(replace(program, command=command)))
    return port


def copy_data(primary: KillableServer, url: str, name: str, *options: str) -> Program:
    """Copy the data of a running server with pg_basebackup, over *url*. Returns the program of the copy."""
    program = primary.process.program
    command = list(program.command)
    data = Path(command[command.index("-D") + 1])
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
        seconds=_COPY_SECONDS,
    )
    command[command.index("-D") + 1] = copy
    return replace(program, name=name, command=command, log=program.log.with_name(f"{name}.log"))
