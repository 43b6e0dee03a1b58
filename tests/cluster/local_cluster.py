"""Processes on this machine in place of a cluster's pods, behind the kubectl commands that the check runs."""

import asyncio
import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from deploy.local.machine.folders import CHECKOUT
from service.postgres.pool import Connection
from tests.cluster.kubernetes import CALLERS, CheckFailed, Cluster
from tests.harness.mail_server import MailServer
from tests.harness.processes import Process

# As much of the API's Deployment as the check reads.
_CONTAINER = {"image": "calculation-requests:dev", "securityContext": {}}
_API = {"spec": {"template": {"spec": {"securityContext": {}, "containers": [_CONTAINER]}}}}


class LocalCluster(Cluster):
    """Does what each command does in a cluster, unless *broken* says what goes wrong."""

    broken = ""
    restarts = 0
    exit_status = 0

    def __init__(
        self,
        processes: Mapping[str, Process],
        database: Connection,
        mail_server: MailServer,
        variables: dict[str, str],  # of the callers
        log: Path,  # likewise
    ) -> None:
        super().__init__("local")
        self.processes, self.variables = processes, variables
        self._database, self._mail_server, self._log = database, mail_server, log
        self._calling: asyncio.subprocess.Process | None = None

    async def kubectl(self, *words: str, sent: str = "") -> str:
        if self.broken and self.broken in " ".join(words):
            raise CheckFailed(f"kubectl {' '.join(words[:2])}: forbidden")
        match words:
            case ("exec", pod, "--", "python", "-c", _):
                await self._signal(pod)
            case ("create", *_):
                await self._call(json.loads(sent)["spec"]["containers"][0]["command"])
            case ("rollout", "restart", *_):
                for process in self.processes.values():
                    await process.stop()
                    process.start()
            case ("rollout", "status", *_):
                await asyncio.gather(*(each.becomes_ready() for each in self.processes.values()))
            case ("wait", _, "--for=jsonpath={.status.phase}=Succeeded", _):
                if self._calling is None or await self._calling.wait() != 0:
                    raise CheckFailed("kubectl wait: timed out")
            case ("delete", *_) if self._calling is not None and self._calling.returncode is None:
                self._calling.kill()
        return await self._read(*words)

    async def _read(self, *words: str) -> str:
        """Return what a command prints."""
        printed: object = ""
        match words:
            case ("exec", "statefulset/postgres", *_, statement):
                printed = await self._database.fetchval(statement)
            case ("logs", *_) if self._log.exists():
                printed = self._log.read_text()
            case ("get", "pod", "--selector", selector, *_):
                printed = selector.rpartition("=")[2]
            case ("get", "pod", _, "-o", path):
                printed = self.exit_status if "exitCode" in path else self.restarts
            case ("get", "deploy", *_):
                printed = json.dumps(_API)
            case ("get", "--raw", _):
                to = [{"Address": each} for mail in self._mail_server.accepted for each in mail.recipients]
                printed = json.dumps({"total": len(to), "messages": [{"To": [each]} for each in to]})
        return "" if printed is None else str(printed)

    async def _call(self, command: list[str]) -> None:
        here = {"python": sys.executable, "http://api": self.processes["api"].base_url}
        words = [here.get(word, word) for word in command]
        with self._log.open("wb") as log:
            self._calling = await asyncio.create_subprocess_exec(
                *words, env=self.variables, cwd=CHECKOUT, stdout=log, stderr=log
            )

    async def _signal(self, pod: str) -> None:
        """Send a signal to the process in a pod. A process that was killed is started again."""
        if pod == CALLERS:
            assert self._calling is not None
            self._calling.send_signal(signal.SIGKILL if self.broken == "crash" else signal.SIGTERM)
            return
        process = self.processes[pod]
        process.running.send_signal(signal.SIGTERM if self.broken == "no kill" else signal.SIGKILL)
        status = await process.exit_status()
        self.exit_status, self.restarts = (status if status >= 0 else 128 - status), self.restarts + 1
        process.start()
        await process.becomes_ready()
