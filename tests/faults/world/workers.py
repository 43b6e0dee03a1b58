"""The processes under test, each behind its own proxies, so that each can lose its connections alone."""

import asyncio
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx

from deploy.local.errors import LocalStackError
from deploy.local.machine.ports import accepts, free_port
from tests.faults.verdict.records import Interval, Kill, Record
from tests.harness import databases, programs
from tests.harness.processes import Process, bare_environment, python, run_process
from tests.harness.servers import Servers
from tests.harness.tcp_proxy import TcpProxy
from worker.process import ROLES

RELAYS = ("relay-1", "relay-2", "relay-3")
NAMES = ("api-1", "api-2", *RELAYS, *(f"{role}-{n}" for role in ROLES if role != "relay" for n in (1, 2)))

_EXIT_SECONDS = 30.0
_ENDED_WHILE_STARTING = 128 + signal.SIGTERM
_WATCH_SECONDS = 0.2


class Worker(Process):
    """One process of the service. After a kill it is started again at once."""

    def __init__(
        self,
        name: str,
        servers: Servers,
        settings: Mapping[str, str],
        record: Record,
        folder: Path,
        *,
        broken: str | None,
    ) -> None:
        self.role = name.partition("-")[0]
        self.postgres = TcpProxy(servers.postgres_url, name=name)
        self.broker = TcpProxy(servers.broker_url, name=name)
        self._record = record
        self._expected_gone = False
        probes_port = free_port()
        port = free_port() if self.role == "api" else probes_port
        module = [] if broken is None else ["tests.faults.broken_programs", broken]
        module += ["service", "serve"] if self.role == "api" else ["worker", self.role]
        database_url = databases.as_role(self.postgres.url, "api" if self.role == "api" else "worker")
        links = {"DATABASE_URL": database_url, "AMQP_URL": self.broker.url}
        ports = {"PORT": str(port), "HEALTH_PORT": str(probes_port)}
        environment = bare_environment(**settings, **links, **ports, SMTP_HELO_NAME=name)
        self._environment = environment
        super().__init__(
            name,
            python(*module),
            environment=environment,
            port=port,
            probes_port=probes_port,
            folder=folder,
        )

    async def kill(self) -> int:
        """Send SIGKILL, and start it again. Returns the exit status."""
        self._expected_gone = True
        status = await self._kill()
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
            self._record.freezes.append(Interval(began, time.monotonic(), self.name))

    async def restart(self, *, clock_off_by: int = 0) -> None:
        """Send SIGTERM, as a rolling update does, and start it again, perhaps with a clock wrong by days."""
        await self.leave()
        clock = programs.variables_of_clock(clock_off_by) if clock_off_by else {}
        self._program = replace(self._program, environment={**self._environment, **clock})
        self.running.program = self._program
        self._start_again()

    @property
    def has_other_clock(self) -> bool:
        """Whether the process has loaded libfaketime."""
        return "libfaketime" in Path(f"/proc/{self.running.pid}/maps").read_text()

    async def leave(self) -> None:
        """Send SIGTERM, and record an exit that is late or not clean."""
        self._expected_gone = True
        clean = {0} if accepts(self.probes_port) else {0, _ENDED_WHILE_STARTING}
        self.terminate()
        try:
            status = await self.exit_status(seconds=_EXIT_SECONDS)
        except TimeoutError:
            self._record.deaths.append(f"{self.name} ignores SIGTERM for {_EXIT_SECONDS:.0f} s")
            await self._kill()
        else:
            if status not in clean:
                self._record.deaths.append(f"after SIGTERM: {self.running.trouble()}")

    async def explanations(self) -> tuple[str, str]:
        """Return what its readiness probe answers, and what `doctor` prints with its settings."""
        async with httpx.AsyncClient(base_url=self.probes_url, timeout=10.0) as client:
            ready = (await client.get("/readyz")).text
        program = "service" if self.role == "api" else "worker"
        return ready, (await run_process(program, "doctor", environment=self._program.environment)).output

    async def watch(self) -> None:
        """Record each death that no fault caused, and start the process again, until cancelled."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            trouble = self.running.trouble()
            if trouble is not None and not self._expected_gone:
                self._record.deaths.append(trouble)
                self.start()

    async def may_become_ready(self) -> None:
        """Wait until it is ready, for at most a minute. If it dies meanwhile, `watch` records that."""
        with suppress(LocalStackError):
            await self.becomes_ready()

    async def _kill(self) -> int:
        self._record.kills.append(Kill(self.name, time.monotonic()))
        return await super().kill()

    def _start_again(self) -> None:
        self.start()
        self._expected_gone = False
