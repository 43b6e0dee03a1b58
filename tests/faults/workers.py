"""The processes under test, each behind its own proxies, so that each can lose its connections alone."""

import asyncio
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.ports import accepts, free_port
from tests.faults.records import Record, Span
from tests.harness import databases, programs
from tests.harness.processes import Process, python
from tests.harness.servers import Servers
from tests.harness.tcp_proxy import TcpProxy
from worker.process import ROLES

NAMES = ("relay-3", *(f"{role}-{number}" for role in ("api", *ROLES) for number in (1, 2)))


class Worker(Process):
    """One process of the service. After a kill it is started again at once."""

    def __init__(
        self, name: str, servers: Servers, record: Record, folder: Path, settings: Mapping[str, str]
    ) -> None:
        self.role = name.partition("-")[0]
        self.postgres = TcpProxy(servers.postgres_url, name=name)
        self.broker = TcpProxy(servers.broker_url, name=name)
        self._record = record
        self._expected_gone = False
        is_api, probes_port = self.role == "api", free_port()
        port = free_port() if is_api else probes_port
        command = ["service", "serve"] if is_api else ["worker", self.role]
        if record.plan.broken:
            command = ["tests.faults.broken_programs", record.plan.broken, *command]
        self._environment = {
            **settings,
            "DATABASE_URL": databases.as_role(self.postgres.url, "api" if is_api else "worker"),
            "AMQP_URL": self.broker.url,
            "PORT": str(port),
            "HEALTH_PORT": str(probes_port),
            "SMTP_HELO_NAME": name,
        }
        ports = {"port": port, "probes_port": probes_port}
        super().__init__(name, python(*command), environment=self._environment, **ports, folder=folder)

    async def kill(self) -> int:
        """Send SIGKILL, and start it again. Returns the exit status."""
        self._expected_gone = True
        self._record.kills.append((self.name, time.monotonic()))
        status = await super().kill()
        self._start_again()
        return status

    async def freeze_for(self, seconds: float) -> bool:
        """Send SIGSTOP, and SIGCONT after *seconds*. The process does not notice the time between.

        Returns whether it had stopped.
        """
        began = time.monotonic()
        self.freeze()
        try:
            await asyncio.sleep(seconds)
            return self.is_frozen
        finally:
            self.thaw()
            self._record.freezes.append(Span(self.name, began, time.monotonic()))

    async def restart(self, *, clock_off_by: int = 0) -> None:
        """Send SIGTERM, as a rolling update does, and start it again, perhaps with a clock wrong by days."""
        await self.leave()
        clock = programs.variables_of_clock(clock_off_by) if clock_off_by else {}
        environment = {**self._environment, **clock}
        self.running.program = replace(self.running.program, environment=environment)
        self._start_again()

    @property
    def has_other_clock(self) -> bool:
        """Whether the process has loaded libfaketime."""
        return "libfaketime" in Path(f"/proc/{self.running.pid}/maps").read_text()

    async def leave(self) -> None:
        """Send SIGTERM, and record an exit that is late or not clean."""
        self._expected_gone = True
        clean = {0} if accepts(self.probes_port) else {0, 128 + signal.SIGTERM}  # while it starts
        self.terminate()
        try:
            if await self.exit_status(seconds=30.0) not in clean:
                self._record.exceptions.append(f"after SIGTERM: {self.running.trouble()}")
        except TimeoutError as error:
            self._record.exceptions.append(f"after SIGTERM: {error}")
            await super().kill()

    async def watch(self) -> None:
        """Record each death that no fault caused, and start the process again, until cancelled."""
        while True:
            await asyncio.sleep(0.2)
            trouble = self.running.trouble()
            if trouble is not None and not self._expected_gone:
                self._record.exceptions.append(trouble)
                self.start()

    async def may_become_ready(self) -> None:
        """Wait until it is ready, for at most a minute. If it dies meanwhile, `watch` records that."""
        with suppress(LocalStackError):
            await self.becomes_ready()

    def _start_again(self) -> None:
        self.start()
        self._expected_gone = False
