"""Debian's nginx and HAProxy in front of APIs, with the settings in deploy/gateways."""

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.ports import free_port
from tests.harness.processes import Process, bare_environment
from tests.harness.programs import configuration, debian_program
from tests.harness.servers import children
from tests.harness.waiting import eventually


class Nginx(Process):
    closes_connections = True  # of callers that are idle, when a process is taken out
    repeats_creates_with_key = False

    def __init__(self, apis: Sequence[Process], folder: Path) -> None:
        port = free_port()
        self._settings = _settings("nginx.conf", apis).replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
        self._folder = folder
        self._out: set[int] = set()
        self._configure()
        arguments = ["-e", "stderr", "-p", str(folder), "-c", str(folder / "nginx.conf")]
        command = [*debian_program("nginx"), *arguments]
        super().__init__("nginx", command, environment=bare_environment(), port=port, folder=folder)

    def _configure(self) -> None:
        settings = self._settings
        for port in self._out:
            assert f":{port} " in settings
            settings = settings.replace(f":{port} ", f":{port} down ")
        user = "" if os.getuid() else "user root;"
        text = configuration("nginx.conf", folder=self._folder, user=user, settings=settings)
        (self._folder / "nginx.conf").write_text(text)

    async def take_out(self, api: Process) -> None:
        """Send *api* no more calls, and wait until it has answered those that it got."""
        self._out.add(api.port)
        old = self._reload()
        await eventually(lambda: self._workers() and not old & self._workers())

    async def put_in(self, api: Process) -> None:
        """Send calls to *api* again. An old worker may still wait for answers."""
        self._out.remove(api.port)
        old = self._reload()
        await eventually(lambda: self._workers() - old)

    def _reload(self) -> set[int]:
        """Make new workers with the configuration as it is now, and return the old ones."""
        old = self._workers()
        self._configure()
        self.running.send_signal(signal.SIGHUP)
        return old

    def _workers(self) -> set[int]:
        return set(children(self.running.pid))


class HAProxy(Process):
    closes_connections = False
    repeats_creates_with_key = True

    def __init__(self, apis: Sequence[Process], folder: Path) -> None:
        port = free_port()
        settings = _settings("haproxy.cfg", apis).replace(":443 ssl crt api.pem", f"127.0.0.1:{port}")
        file = folder / "haproxy.cfg"
        file.write_text(configuration("haproxy.cfg", folder=folder, settings=settings))
        self._admin = folder / "admin"
        self._names = {api.port: f"api/api{number}" for number, api in enumerate(apis, start=1)}
        command = [*debian_program("haproxy"), "-db", "-f", str(file)]
        super().__init__("haproxy", command, environment=bare_environment(), port=port, folder=folder)

    async def take_out(self, api: Process) -> None:
        """Send *api* no more calls. At its SIGTERM, it answers those that it got."""
        await self._set_state(api, "drain")

    async def put_in(self, api: Process) -> None:
        await self._set_state(api, "ready")

    async def _set_state(self, api: Process, state: str) -> None:
        reader, writer = await asyncio.open_unix_connection(self._admin)
        writer.write(f"set server {self._names[api.port]} state {state}\n".encode())
        assert await reader.read() == b"\n"
        writer.close()


def _settings(file: str, apis: Sequence[Process]) -> str:
    settings = (CHECKOUT / "deploy" / "gateways" / file).read_text()
    for number, api in enumerate(apis, start=1):
        settings = settings.replace(f"192.0.2.{number}:8000", f"127.0.0.1:{api.port}")
    return settings
