"""The development overlay's processes on this machine, behind the kubectl commands that the check runs."""

import asyncio
import json
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aio_pika.abc import AbstractChannel

from deploy.local.machine.folders import CHECKOUT
from service.postgres.pool import Connection
from tests.cluster.kubernetes import CALLERS, CheckFailed, Cluster
from tests.harness import queues
from tests.harness.mail_server import MailServer
from tests.harness.processes import Process
from worker.rabbitmq import topology

# As much of the API's Deployment as the check reads.
_CONTAINER = {"image": "calculation-requests:dev", "securityContext": {}}
_API = {"spec": {"template": {"spec": {"securityContext": {}, "containers": [_CONTAINER]}}}}


class LocalCluster(Cluster):
    """Does what each command does in a cluster, unless *broken* says what goes wrong."""

    seconds_to_first_create = 20.0
    seconds_to_change = 30.0

    def __init__(
        self,
        processes: Mapping[str, Process],
        servers: tuple[Connection, AbstractChannel, MailServer],
        given: dict[str, str],
        folder: Path,
    ) -> None:
        super().__init__("local")
        self.broken = ""
        self._processes = processes
        self._database, self._channel, self._mail_server = servers
        self.given = given  # the variables of the callers
        self._log = folder / "callers.log"
        self._calling: asyncio.subprocess.Process | None = None
        self._containers_now: dict[str, dict[str, Any]] = defaultdict(
            lambda: {"restartCount": 0, "lastState": {}, "ready": True}
        )

    async def kubectl(self, *words: str, sent: str = "") -> str:
        if self.broken and self.broken in " ".join(words):
            raise CheckFailed(f"kubectl {' '.join(words[:2])}: forbidden")
        match words:
            case ("exec", pod, "--", "python", "-c", _):
                await self._signal(pod)
            case ("create", *_):
                await self._call(json.loads(sent)["spec"]["containers"][0]["command"])
            case ("rollout", "restart", *_):
                for process in self._processes.values():
                    await process.stop()
                    process.start()
            case ("rollout", "status", *_):
                await asyncio.gather(*(each.becomes_ready() for each in self._processes.values()))
            case ("delete", *_) if self._calling is not None and self._calling.returncode is None:
                self._calling.kill()
                await self._calling.wait()
            case _:
                return await self._read(*words)
        return ""

    async def _read(self, *words: str) -> str:
        """Return what a command prints that changes nothing."""
        found: Any = ""
        match words:
            case ("exec", "statefulset/postgres", *_, statement):
                value = await self._database.fetchval(statement)
                return "" if value is None else str(value)
            case ("exec", "statefulset/rabbitmq", *_, "messages"):
                names = [queue.name for queue in topology.QUEUES]
                return "\n".join([f"{name} {await queues.count(self._channel, name)}" for name in names])
            case ("logs", *_) if self._calling is None:
                raise CheckFailed("kubectl logs: not found")
            case ("logs", *_):
                return self._log.read_text()
            case ("get", "pod", "--selector", selector, *_):
                found = {"items": [self._pod(selector.rpartition("=")[2])]}
            case ("get", "pod", *_):
                found = {"status": self._status_of_callers()}
            case ("get", "deploy", *_):
                found = _API
            case ("get", "--raw", path):
                start, limit = map(int, re.findall(r"\d+", path.rpartition("?")[2]))
                to = [each for mail in self._mail_server.accepted for each in mail.recipients]
                found = {"messages": [{"To": [{"Address": each}]} for each in to[start : start + limit]]}
        return json.dumps(found)

    async def _call(self, command: list[str]) -> None:
        words = [
            {"python": sys.executable, "http://api": self._processes["api"].base_url}.get(each, each)
            for each in command
        ]
        with self._log.open("wb") as output:
            self._calling = await asyncio.create_subprocess_exec(
                *words, env=self.given, cwd=CHECKOUT, stdout=output, stderr=output
            )

    def _status_of_callers(self) -> dict[str, Any]:
        assert self._calling is not None
        status = self._calling.returncode
        state = {} if status is None else {"terminated": {"exitCode": status}}
        return {"phase": "Running", "containerStatuses": [{"state": state}]}

    def _pod(self, name: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "status": {"containerStatuses": [{**self._containers_now[name]}]}}

    async def _signal(self, pod: str) -> None:
        """Send a signal to the process in a pod. A process that was killed is started again."""
        if pod == CALLERS:
            assert self._calling is not None
            self._calling.send_signal(signal.SIGKILL if self.broken == "crash" else signal.SIGTERM)
            return
        process = self._processes[pod]
        process.running.send_signal(signal.SIGTERM if self.broken == "no kill" else signal.SIGKILL)
        status = await process.exit_status()
        process.start()
        await process.becomes_ready()
        container = self._containers_now[pod]
        container["restartCount"] += 1
        container["lastState"] = {"terminated": {"exitCode": 128 - status if status < 0 else status}}
