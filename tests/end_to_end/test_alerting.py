"""Each server is stopped in turn: its alerts, and no others, come through Prometheus and Alertmanager."""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from msgspec.structs import replace

from deploy.local.machine.folders import Place
from tests.deploy.alerts import GROUPS, PANELS, filled_in
from tests.deploy.pages import INSTALLATION, alert_entries
from tests.deploy.prometheus import Alerting, alerting
from tests.end_to_end.parties import another_request, client_of
from tests.harness import databases, processes
from tests.harness.in_process import run
from tests.harness.issuer import Issuer, api_settings
from tests.harness.mail_server import ScriptedMailServer
from tests.harness.processes import Process, api_process, environment_of, started, worker_process
from tests.harness.servers import Servers, enable_plugin, private_servers, scratch_folder
from tests.harness.waiting import eventually
from worker.process import ROLES

pytestmark = pytest.mark.long

# These name no server. Each follows on any outage, on its end, or on a machine that is too busy.
_SYMPTOMS = {"ApiBudgetBurning", "ApiBudgetBurningSlowly", "EmailBudgetBurning", "EmailBudgetBurningSlowly"}
_SYMPTOMS |= {"ApiSlow", "PostgresPoolSaturated"}
# The first reconciliation is up to five minutes away. RabbitMQ before 4.1 lacks the metric that is watched.
_SYMPTOMS |= {"ReconciliationNotRun", "EngineNotWatched RabbitMQ"}
# A worker reads no queue until it is ready. On a busy machine that takes longer than the alert's two seconds.
_NOT_READING = {f"ConsumerNotReading {queue}" for queue in ("notifications", "calculation-results")}
_WHILE_STARTING = {"worker": _NOT_READING}
# No exporter of these runs here. Without a reconciliation or a mailbox there is nothing to show.
_NOTHING_TO_SHOW = re.compile("cnpg_|kubelet_|reconciliation_|bounces_look_age_")
_SHOWN = {"{{version}} on {{python}}": 2, "{{connection}} connected": 1, "{{namespace}} nodes": 3}
# What an entry of the runbook has its reader run or read: commands, lines of a log, a panel, other entries.
_STEPS = re.compile(
    r"`operate (worker (?:doctor|outbox list))`|`(kubectl [^`]* get )|`(\w+_paused)`|\*(\w+)\*"
)


class Outage(NamedTuple):
    """How a server is stopped and started, the alerts that then fire, and what names it as the cause."""

    server: str
    stop: Callable[[], Awaitable[Any]]
    start: Callable[[], Awaitable[Any]]
    alerts: set[str]
    cause: str
    doctor: str = ""


class World(NamedTuple):
    """Everything that runs."""

    servers: Servers
    mail: ScriptedMailServer
    api: Process
    worker: Process
    alerting: Alerting
    operator: dict[str, str]

    @property
    def outages(self) -> list[Outage]:
        """Every outage, in order. The budgets still burn after that of Postgres."""
        postgres, broker, worker, api = self.servers.postgres, self.servers.broker, self.worker, self.api
        mail, queue = "wrong +mail server", "(warning|wrong) +queue notifications"
        absent = {f"ProcessAbsent {role}" for role in ROLES}
        no_postgres = {"PostgresUnavailable", "ApiBudgetBurning"}
        no_rabbitmq = {"RelayNotConnected", "OutboxNotDraining"} | _NOT_READING
        refused = "ConnectionRefusedError|The RabbitMQ server was killed"
        return [
            Outage("mail server", self._stop_mail, self.mail.start, {"EmailsNotSent"}, mail, mail),
            Outage("worker", worker.kill, partial(_start, worker), absent, "The worker was killed", queue),
            Outage("API", api.kill, partial(_start, api), {"ProcessAbsent api"}, "The api was killed"),
            Outage(
                "Postgres", postgres.kill, postgres.start, no_postgres, "server was killed", "wrong +postgres"
            ),
            Outage("RabbitMQ", broker.kill, broker.start, no_rabbitmq, refused, "wrong +rabbitmq"),
        ]

    async def _stop_mail(self) -> None:
        self.mail.stop()

    @property
    def firing(self) -> set[str]:
        return {name for name, _ in self.alerting.firing}

    async def evidence(self, url: str) -> str:
        """Return what the steps of a runbook's entry show here, and those of firing alerts that it names."""
        entries = {name.lower(): do for name, do in alert_entries().items()}
        entry = entries[url.partition("#")[2]]
        firing = {name.split()[0].lower() for name in self.firing}
        read = [entry, *(entries[name] for name in firing.intersection(re.findall(r"#(\w+)", entry)))]
        steps = dict.fromkeys(step for each in read for step in _STEPS.findall(each))
        return "\n".join([await self._show(*step) for step in steps])

    async def _show(self, command: str, kubectl: str, line: str, panel: str) -> str:
        if command:
            return (await run(*command.split(), environment=self.operator)).output
        if line:
            return "\n".join(each for each in self.worker.output.splitlines()[-50:] if line in each)
        if kubectl:  # shows which pods have ended
            every = [self.api.running, self.worker.running]
            every += [self.servers.postgres.process, self.servers.broker.process]
            return "\n".join(filter(None, (each.trouble() for each in every)))
        return str([await self.alerting.query(query) for title, _, query in _QUERIES if title == panel])


async def _start(process: Process) -> None:
    process.start()
    await process.becomes_ready()


@pytest.fixture
async def world(issuer: Issuer, tmp_path: Path) -> AsyncIterator[World]:
    """Run the API and a worker under load, with private servers, and Prometheus and Alertmanager on them."""
    async with AsyncExitStack() as stack:
        folder = Place(folder=stack.enter_context(scratch_folder()))
        servers = await asyncio.to_thread(stack.enter_context, private_servers(folder))
        rabbitmq = await asyncio.to_thread(enable_plugin, "rabbitmq_prometheus", servers.broker)
        async with databases.connected(servers.postgres.url) as administrator:
            await databases.prepare(administrator)
        mail = await stack.enter_async_context(ScriptedMailServer())
        settings = processes.email_settings(
            database_url=databases.as_role(servers.postgres.url, "worker"),
            amqp_url=servers.broker.url,
            smtp_url=mail.url,
        )
        of_api = api_settings(databases.as_role(servers.postgres.url, "api"), issuer)
        api = api_process(replace(of_api, database_timeout_seconds=2.0), tmp_path)
        worker = worker_process(settings, tmp_path)
        await stack.enter_async_context(started(api, worker))
        scraped = scrape_configs(api, worker, rabbitmq)
        alerts = await stack.enter_async_context(alerting(GROUPS, scraped, tmp_path))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        calls = [tasks.create_task(call_again_and_again(api, issuer.token())) for _ in range(4)]
        operator = environment_of(settings, DATABASE_URL=databases.as_role(servers.postgres.url, "operator"))
        yield World(servers, mail, api, worker, alerts, operator)
        for call in calls:
            call.cancel()


async def call_again_and_again(api: Process, token: str) -> None:
    async with client_of(api, token) as caller:
        while True:
            with suppress(httpx.TransportError):
                await caller.post("/v1/request", json=another_request())
            await asyncio.sleep(0.3)


def scrape_configs(api: Process, worker: Process, rabbitmq: int) -> list[dict[str, Any]]:
    """Return the targets: both processes, and the node of RabbitMQ, as three pods."""
    ours = [_target(process.probes_port, "calculation-requests", process.name) for process in (api, worker)]
    configs: list[dict[str, Any]] = [{"job_name": "processes", "static_configs": ours}]
    nodes = [_target(rabbitmq, "calculation-requests-rabbitmq", f"node-{n}") for n in range(3)]
    (detailed,) = set(re.findall(r"`(/metrics/detailed\?[^`]+)`", INSTALLATION.read_text()))
    for path in ("/metrics", detailed):
        place = {"metrics_path": urlsplit(path).path, "params": parse_qs(urlsplit(path).query)}
        configs.append({"job_name": place["metrics_path"], "static_configs": nodes, **place})
    return configs


def _target(port: int, monitor: str, pod: str) -> dict[str, Any]:
    """Return a target with the labels that Prometheus's operator adds."""
    labels = {"job": f"here/{monitor}", "namespace": "here", "pod": pod, "instance": pod}
    return {"targets": [f"127.0.0.1:{port}"], "labels": labels}


# The title, legend and query of every line of the dashboard.
_QUERIES: list[tuple[str, str, str]] = [
    (panel["title"], target["legendFormat"], filled_in(target["expr"], "here"))
    for panel in PANELS
    for target in panel["targets"]
]


async def shows_all(alerts: Alerting) -> bool:
    """Whether each line has a number, and what its legend names, unless it has nothing to show."""
    for _, legend, query in _QUERIES:
        series = await alerts.query(query)
        numbers = [float(each["value"][1]) for each in series]
        named = all(label in each["metric"] for each in series for label in re.findall(r"{{(\w+)}}", legend))
        as_expected = legend not in _SHOWN or {_SHOWN[legend]} == {*numbers}
        is_shown = named and as_expected and any(map(math.isfinite, numbers))
        if not (is_shown or _NOTHING_TO_SHOW.search(query)):
            return False
    return True


async def end(world: World, outage: Outage) -> None:
    """Start the server again, and wait until its alerts are resolved, and no longer pending."""
    await outage.start()
    ended = (outage.alerts | _WHILE_STARTING.get(outage.server, set())) - _SYMPTOMS
    names = "|".join(sorted({name.split()[0] for name in ended}))

    async def are_resolved() -> bool:
        pending = await world.alerting.query(f'ALERTS{{alertname=~"{names}"}}')
        return not pending and not ended & world.firing

    await eventually(are_resolved)


async def test_each_outage_fires_its_alerts_and_no_other_and_the_runbook_leads_to_its_cause(world):
    unwatched = {f"EngineNotWatched {engine}" for engine in ("Postgres", "poolers", "backups", "disks")}
    await eventually(lambda: unwatched <= world.firing)
    await eventually(lambda: shows_all(world.alerting))
    for outage in world.outages:
        began = time.time()
        await outage.stop()
        await eventually(lambda: outage.alerts <= world.firing)  # noqa: B023 - awaited here
        if outage.doctor:
            ended = await run("worker", "doctor", environment=world.operator)
            assert re.match(outage.doctor, ended.output), ended.output
        for one in {one.name: one for one in world.alerting.fired if one.name in outage.alerts}.values():
            shown = await world.evidence(one.runbook_url)
            assert re.search(outage.cause, shown), f"{one.name} leads to {shown}"
        if outage.server != "RabbitMQ":  # Its plugin would then listen on every interface.
            await end(world, outage)
        fired = {one.name: round(one.at - began, 1) for one in world.alerting.fired if one.at >= began}
        print(outage.server, fired)  # noqa: T201 - for tests/README.md#alerts
        assert fired.keys() <= outage.alerts | _WHILE_STARTING.get(outage.server, set()) | _SYMPTOMS
