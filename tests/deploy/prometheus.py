"""Debian's Prometheus and Alertmanager on the loopback, with our rules at a sixtieth of their time."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import msgspec

from deploy.local.machine import packages
from deploy.local.machine.ports import free_port
from tests.deploy.alerts import written
from tests.harness.fixed_answers import http_answer
from tests.harness.http import NO_TLS
from tests.harness.processes import Process, bare_environment, started
from tests.harness.programs import debian_program

# A minute of the rules takes a second. A scrape every half second is half as frequent as the manifests say.
_FACTOR = 60
_EVERY = "500ms"
_UNITS = {"m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"(?<=\[)(\d+)([mhd])(?=\])|\A(\d+)([mhd])\Z")
# Factors that stand for a window or an interval, and ages of an e-mail and an event. All other numbers of
# seconds are compared with what the processes themselves do every few minutes, which takes as long as ever.
_SECONDS = re.compile(r'\b(?:60|300)(?= \*)|(?<=> )60$|(?<=le=")300[.]0(?=")', re.MULTILINE)
_NAMING_LABELS = ("role", "queue", "engine", "kind")


class Fired(msgspec.Struct, frozen=True):
    """An alert that Alertmanager has sent: its name, with what its summary names, and since when it fires."""

    name: str
    namespace: str | None
    at: float
    runbook_url: str


class Alerting:
    """Both servers, and the alerts that came through them."""

    def __init__(self, prometheus: Process) -> None:
        self.fired: list[Fired] = []
        self.firing: set[tuple[str, str | None]] = set()  # names and namespaces
        self.client = httpx.AsyncClient(base_url=prometheus.base_url, timeout=20, verify=NO_TLS)

    async def query(self, query: str) -> list[dict[str, Any]]:
        """Return the series that a query yields now. Fails if Prometheus refuses the query, or warns."""
        answer = (await self.client.get("/api/v1/query", params={"query": query})).json()
        assert answer["status"] == "success", answer
        assert "warnings" not in answer, answer
        return answer["data"]["result"]

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one call of Alertmanager's webhook."""
        head = await reader.readuntil(b"\r\n\r\n")
        (length,) = re.findall(rb"(?i)content-length: (\d+)", head)
        for alert in msgspec.json.decode(await reader.readexactly(int(length)))["alerts"]:
            self._note(alert)
        writer.write(http_answer("200 OK", b""))
        await writer.drain()
        writer.close()

    def _note(self, alert: dict[str, Any]) -> None:
        labels = alert["labels"]
        names = [labels["alertname"], *(labels[name] for name in _NAMING_LABELS if name in labels)]
        name, namespace = " ".join(names[:2]), labels.get("namespace")
        if alert["status"] == "resolved":
            self.firing.discard((name, namespace))
            return
        self.firing.add((name, namespace))
        since = datetime.fromisoformat(alert["startsAt"]).timestamp()
        self.fired.append(Fired(name, namespace, since, alert["annotations"]["runbook_url"]))


def shortened(groups: Any) -> Any:
    """Return rule groups with every duration divided by the factor."""
    if isinstance(groups, Mapping):
        return {name: shortened(each) for name, each in groups.items()}
    if isinstance(groups, list):
        return [shortened(each) for each in groups]
    if not isinstance(groups, str):
        return groups
    shorter = _DURATION.sub(lambda found: f"{_seconds(found[0])}s", groups)
    return _SECONDS.sub(lambda found: str(float(found[0]) / _FACTOR), shorter)


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * _UNITS[duration[-1]] // _FACTOR


@asynccontextmanager
async def alerting(
    groups: Sequence[Any], scraped: Sequence[Mapping[str, Any]], folder: Path
) -> AsyncIterator[Alerting]:
    """Run both, with rule groups and with entries of `scrape_configs`. Skips the test without them."""
    ports = {name: free_port() for name in ("prometheus", "prometheus-alertmanager")}
    listening = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    prometheus = _server("prometheus", ports, folder, f"--storage.tsdb.path={folder}/prometheus")
    router = _server(
        *("prometheus-alertmanager", ports, folder),
        *(f"--storage.path={folder}/alertmanager", "--cluster.listen-address="),
    )
    servers = Alerting(prometheus)
    receiver = await asyncio.start_server(servers.receive, "127.0.0.1", 0)
    hook = f"http://127.0.0.1:{receiver.sockets[0].getsockname()[1]}/"
    written(folder / "rules.json", {"groups": shortened(list(groups))})
    written(
        folder / "prometheus.json",
        {
            "global": {"scrape_interval": _EVERY, "evaluation_interval": _EVERY},
            "rule_files": [f"{folder}/rules.json"],
            "alerting": {
                "alertmanagers": [{"static_configs": [{"targets": [listening["prometheus-alertmanager"]]}]}]
            },
            "scrape_configs": scraped,
        },
    )
    written(folder / "prometheus-alertmanager.json", _routes(hook))
    async with receiver, servers.client, started(router, prometheus, ready=False):
        for server in (router, prometheus):
            await server.becomes_ready(path="/-/ready")
        yield servers


def _routes(hook: str) -> dict[str, Any]:
    """Return a configuration that sends each of our alerts at once, by the label that the runbook names."""
    ours = {
        "receiver": "ours",
        "matchers": ['service="calculation-requests"'],
        "group_by": ["..."],
        "group_wait": "0s",
        "group_interval": "1s",
    }
    receivers = [{"name": "others"}, {"name": "ours", "webhook_configs": [{"url": hook}]}]
    return {"route": {"receiver": "others", "routes": [ours]}, "receivers": receivers}


def _server(package: str, ports: Mapping[str, int], folder: Path, *options: str) -> Process:
    program = debian_program(package)
    if package == "prometheus-alertmanager" and len(program) > 1:
        program = _relocated(Path(program[-1]), folder)
    address = f"--web.listen-address=127.0.0.1:{ports[package]}"
    command = [*program, f"--config.file={folder}/{package}.json", address, "--log.level=warn", *options]
    return Process(package, command, environment=bare_environment(), port=ports[package], folder=folder)


def _relocated(program: Path, folder: Path) -> list[str]:
    """Return the command of an unpacked Alertmanager.

    Debian's reads a template in /usr/share. This copy of it looks below the folder in which it runs.
    """
    copy = folder / program.name
    copy.write_bytes(program.read_bytes().replace(b"/usr/share/prom", b"usr//share/prom"))
    copy.chmod(0o700)
    return ["env", "-C", str(packages.PACKAGES / program.name), str(copy)]
