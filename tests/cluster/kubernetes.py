"""The development overlay in a cluster, by kubectl."""

import asyncio
import json
import re
import shutil
from base64 import b64decode
from pathlib import Path
from uuid import UUID

import msgspec

from service.identifiers import uuid_of
from tests.cluster.verdict import Create

PROCESSES = ("api", "relay", "notifications", "calculations")
_CALLERS = "cluster-check-callers"
_PAGE, _MOST_EMAILS = 500, 1_000_000
_PASSWORD = "made-up-second-password"
_CONTAINER = ".spec.template.spec.containers[0]"
_USER = re.compile("//[^/@]+@")  # of a URL, with the password
_RABBITMQCTL = ("exec", "statefulset/rabbitmq", "--", "rabbitmqctl", "--quiet")
_STORED = """
    SELECT json_object_agg(idempotency_key, id)
      FROM calculation_request
     WHERE idempotency_key LIKE '{}-%'
"""


class KubectlFailed(Exception):
    """kubectl has failed. The message is its own."""


class Cluster:
    """A namespace with the development overlay, in the cluster of KUBECONFIG."""

    def __init__(self, namespace: str, folder: Path) -> None:
        self._namespace = namespace
        self._creates = folder / "creates.jsonl"
        self._callers: asyncio.subprocess.Process | None = None

    async def kubectl(self, *words: str) -> str:
        """Run kubectl to its end, and return its output. Raises KubectlFailed."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*self._command(words), stdout=pipe, stderr=pipe)
        output, errors = await process.communicate()
        if process.returncode:
            raise KubectlFailed(f"kubectl {' '.join(words[:4])}: {errors.decode().strip()}")
        return output.decode()

    def _command(self, words: tuple[str, ...]) -> tuple[str, ...]:
        program = shutil.which("kubectl")
        if program is None:
            raise KubectlFailed("kubectl is not installed")
        return program, "--namespace", self._namespace, *words

    async def start_callers(self, prefix: str, rate: float) -> None:
        """Start callers.py in a pod, because a port-forward ends with the pod that it leads to."""
        sign = "exec deploy/api -- python -m service token demo --key /issuer/key.pem"
        token = (await self.kubectl(*sign.split())).strip()
        image = await self.kubectl("get", "deploy", "api", "-o", f"jsonpath={{{_CONTAINER}.image}}")
        words = ("run", _CALLERS, f"--image={image}", "--restart=Never", "--stdin", "--quiet")
        program = ("--command", "--", "python", "-", "http://api", str(rate), prefix)
        with self._creates.open("wb") as output, Path(__file__).with_name("callers.py").open("rb") as script:
            self._callers = await asyncio.create_subprocess_exec(
                *self._command((*words, f"--env=ACCESS_TOKEN={token}", *program)), stdin=script, stdout=output
            )

    async def stop_callers(self) -> list[Create]:
        """Stop the callers after the creates in flight, and return all creates."""
        await self.kubectl("delete", "pod", _CALLERS, "--ignore-not-found", "--grace-period=60")
        if self._callers is not None:
            await self._callers.wait()
        return [msgspec.json.decode(line, type=Create) for line in self._creates.read_bytes().splitlines()]

    async def restart(self) -> None:
        """Replace the pods of all processes."""
        await self.kubectl("rollout", "restart", *_deployments())
        await self.wait_for_rollout()

    async def upgrade(self, image: str) -> None:
        """Replace the image of all processes, also of their init containers."""
        await self.kubectl("set", "image", *_deployments(), f"*={image}")
        await self.wait_for_rollout()

    async def kill(self, process: str) -> None:
        """Delete a process's pods by force, and wait for the next ones."""
        pods = ("--selector", f"app.kubernetes.io/component={process}")
        await self.kubectl("delete", "pod", *pods, "--grace-period=0", "--force")
        await self.wait_for_rollout()

    async def rotate_passwords(self) -> None:
        """Give the processes second users of Postgres and RabbitMQ, and end the login of RabbitMQ's first."""
        await self.psql(f"CREATE ROLE rotated LOGIN SUPERUSER PASSWORD '{_PASSWORD}'")
        await self.kubectl(*_RABBITMQCTL, "add_user", "rotated", _PASSWORD)
        await self.kubectl(*_RABBITMQCTL, "set_permissions", "rotated", ".*", ".*", ".*")
        name = await self.kubectl(
            "get", "deploy", "api", "-o", f"jsonpath={{{_CONTAINER}.env[*].valueFrom.secretKeyRef.name}}"
        )
        secret = json.loads(await self.kubectl("get", "secret", name.split()[0], "-o", "json"))
        urls = {key: b64decode(value).decode() for key, value in secret["data"].items()}
        rotated = {
            key: _USER.sub(f"//rotated:{_PASSWORD}@", url) for key, url in urls.items() if _USER.search(url)
        }
        await self.kubectl("patch", "secret", name.split()[0], "--patch", json.dumps({"stringData": rotated}))
        await self.restart()
        await self.kubectl(*_RABBITMQCTL, "delete_user", "made-up-user")

    async def wait_for_rollout(self) -> None:
        """Wait until all processes have their new pods. Raises KubectlFailed."""
        for deployment in _deployments():
            await self.kubectl("rollout", "status", deployment, "--timeout=5m")

    async def psql(self, statement: str) -> str:
        """Run a statement as Postgres' superuser, and return its only value."""
        words = ("psql", "--username=postgres", "--tuples-only", "--no-align", "--command")
        return (await self.kubectl("exec", "statefulset/postgres", "--", *words, statement)).strip()

    async def stored(self, prefix: str) -> dict[str, str]:
        """Return the uuids of a run's requests by Idempotency-Key."""
        ids = json.loads(await self.psql(_STORED.format(prefix)) or "{}")
        return {key: uuid_of(UUID(each)) for key, each in ids.items()}

    async def undelivered(self) -> int:
        """Return how many events RabbitMQ has not confirmed."""
        return int(await self.psql("SELECT count(*) FROM outbox"))

    async def queued(self) -> dict[str, int]:
        """Return the number of messages in each queue."""
        listed = await self.kubectl(*_RABBITMQCTL, "list_queues", "--no-table-headers", "name", "messages")
        return {name: int(messages) for name, messages in map(str.split, listed.splitlines())}

    async def recipients(self, prefix: str) -> list[str]:
        """Return the recipients of a run's e-mails, once for each e-mail."""
        proxy = f"/api/v1/namespaces/{self._namespace}/services/mailpit:web/proxy/api/v1/messages"
        found: list[str] = []
        for start in range(0, _MOST_EMAILS, _PAGE):
            page = json.loads(await self.kubectl("get", "--raw", f"{proxy}?start={start}&limit={_PAGE}"))
            found += [message["To"][0]["Address"] for message in page["messages"]]
            if len(page["messages"]) < _PAGE:
                break
        return [address for address in found if address.startswith(f"{prefix}-")]


def _deployments() -> list[str]:
    return [f"deploy/{process}" for process in PROCESSES]
