"""Debian's Prometheus and Alertmanager on the loopback, with our rules at a sixtieth of their time."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from deploy.local.machine import packages
from deploy.local.machine.ports import free_port
from tests.deploy.alerts import written
from tests.harness.http import NO_TLS
from tests.harness.loopback_server import LoopbackServer, http_answer
from tests.harness.processes import Process, bare_environment, started
from tests.harness.programs import debian_program

# A minute of the rules takes a second. A scrape every half second is half as frequent as the manifests say.
_FACTOR = 60
# In JSON: windows of queries, and whole values.
_DURATION = re.compile(r'(?<=[\["])(\d+)([mhd])(?=[\]"])')
# Factors that stand for a window or an interval, and ages of an e-mail and an event. All other numbers of
# seconds are compared with what the processes themselves do every few minutes, which takes as long as ever.
_SECONDS = re.compile(r'\b(?:60|300)(?= \*)|(?<=> )60(?=\\n|")|(?<=le=\\")300[.]0(?=\\")')


class Fired(NamedTuple):
    """An alert that Alertmanager has sent: its name, with what its summary names, and since when it fires."""

    name: str
    at: float
    runbook_url: str


class Alerting(LoopbackServer):
    """Both servers, and the alerts that came to this webhook through them."""

    def __init__(self, prometheus: Process) -> None:
        super().__init__()
        self.fired: list[Fired] = []
        self.firing: set[tuple[str, str | None]] = set()  # names and namespaces
        self.client = httpx.AsyncClient(base_url=prometheus.base_url, timeout=20, verify=NO_TLS)

    async def query(self, query: str) -> list[dict[str, Any]]:
        """Return the series that a query yields now. Fails if Prometheus refuses the query, or warns."""
        answer = (await self.client.get("/api/v1/query", params={"query": query})).json()
        assert (answer["status"], answer.get("warnings")) == ("success", None), answer
        return answer["data"]["result"]

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one call of Alertmanager's webhook."""
        (length,) = re.findall(rb"(?i)content-length: (\d+)", await reader.readuntil(b"\r\n\r\n"))
        for alert in msgspec.json.decode(await reader.readexactly(int(length)))["alerts"]:
            labels, texts = alert["labels"], alert["annotations"]
            given = (labels.get(name) for name in ("alertname", "role", "queue", "engine", "kind"))
            one = (" ".join([*filter(None, given)][:2]), labels.get("namespace"))
            if alert["status"] == "resolved":
                self.firing.discard(one)
                continue
            self.firing.add(one)
            since = datetime.fromisoformat(alert["startsAt"]).timestamp()
            self.fired.append(Fired(one[0], since, texts["runbook_url"]))
        writer.write(http_answer("200 OK", b""))
        await writer.drain()


def shortened(groups: Sequence[Any]) -> Any:
    """Return rule groups with every duration divided by the factor."""
    units, text = {"m": 60, "h": 3600, "d": 86_400}, msgspec.json.encode(groups).decode()
    text = _DURATION.sub(lambda found: f"{int(found[1]) * units[found[2]] // _FACTOR}s", text)
    return msgspec.json.decode(_SECONDS.sub(lambda found: str(float(found[0]) / _FACTOR), text))


@asynccontextmanager
async def alerting(
    groups: Sequence[Any], scraped: Sequence[Mapping[str, Any]], folder: Path
) -> AsyncIterator[Alerting]:
    """Run both, with rule groups and with entries of `scrape_configs`. Skips the test without them."""
    router = _server("prometheus-alertmanager", folder, "--cluster.listen-address=", storage="storage.path")
    prometheus = _server("prometheus", folder, storage="storage.tsdb.path")
    servers = Alerting(prometheus)
    written(folder / "rules.json", {"groups": shortened(groups)})
    written(
        folder / "prometheus.json",
        {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [f"{folder}/rules.json"],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{router.port}"]}]}]},
            "scrape_configs": scraped,
        },
    )
    # Each of our alerts is sent at once, by the label that the runbook names.
    ours = {"receiver": "ours", "matchers": ['service="calculation-requests"'], "group_by": ["..."]}
    ours |= {"group_wait": "0s", "group_interval": "1s"}
    hook = {"name": "ours", "webhook_configs": [{"url": f"http://127.0.0.1:{servers.port}/"}]}
    routes = {"route": {"receiver": "others", "routes": [ours]}, "receivers": [{"name": "others"}, hook]}
    written(folder / "prometheus-alertmanager.json", routes)
    async with servers, servers.client, started(router, prometheus, ready=False):
        for server in (router, prometheus):
            await server.becomes_ready(path="/-/ready")
        yield servers


def _server(package: str, folder: Path, *options: str, storage: str) -> Process:
    program, port = debian_program(package), free_port()
    if package == "prometheus-alertmanager" and len(program) > 1:
        # Debian's reads a template in /usr/share. This copy of it looks below the folder in which it runs.
        copy = folder / package
        copy.write_bytes(Path(program[-1]).read_bytes().replace(b"/usr/share/prom", b"usr//share/prom"))
        copy.chmod(0o700)
        program = ["env", "-C", str(packages.PACKAGES / package), str(copy)]
    files = (f"--config.file={folder}/{package}.json", f"--{storage}={folder}/{package}.data")
    command = [*program, *files, f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn", *options]
    return Process(package, command, environment=bare_environment(), port=port, folder=folder)
