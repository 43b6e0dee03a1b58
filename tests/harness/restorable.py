"""A private Postgres that can be set back to an earlier moment, from a base backup and the log since then."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from deploy.local.machine.folders import Place
from deploy.local.machine.processes import Program, running
from deploy.local.servers.postgres_process import postgres_process
from deploy.local.servers.server import trouble_of_postgres
from tests.harness import databases, scratch
from tests.harness.servers import KillableServer
from tests.harness.standby import copy_data
from tests.harness.waiting import eventually

_RECOVERY_SECONDS = 60.0


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
            moment: datetime = await administrator.fetchval("SELECT clock_timestamp()")
        return moment

    async def restore(self, moment: datetime) -> None:
        """End the server, and recover the backup to *moment* in its place, under the same URL."""
        await self.server.kill()
        command = list(self.backup.command)
        data = Path(command[command.index("-D") + 1])
        (data / "recovery.signal").touch()
        log = data.with_name("data") / "pg_wal"
        settings = {
            "restore_command": f"cp {log}/%f %p",
            "recovery_target_time": moment.isoformat(),
            "recovery_target_action": "promote",
        }
        options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        self.stack.enter_context(running(replace(self.backup, command=[*command, *options])))
        await eventually(self._has_recovered, seconds=_RECOVERY_SECONDS)

    async def _has_recovered(self) -> bool:
        if trouble_of_postgres(self.url):
            return False
        async with databases.connected(self.url) as administrator:
            return not await administrator.fetchval("SELECT pg_is_in_recovery()")


@asynccontextmanager
async def restorable() -> AsyncIterator[Restorable]:
    """Start the server on a free port of the loopback, and make its base backup."""
    with scratch.folder() as folder, ExitStack() as stack:
        server = KillableServer(
            stack.enter_context(postgres_process(Place(folder=folder))), trouble_of_postgres
        )
        async with databases.connected(server.url) as administrator:
            await administrator.execute("ALTER SYSTEM SET wal_keep_size = '1GB'")
            await administrator.execute("SELECT pg_reload_conf()")
            await databases.prepare(administrator)
        backup = await asyncio.to_thread(copy_data, server, server.url, "backup")
        yield Restorable(server.url, server, backup, stack)
