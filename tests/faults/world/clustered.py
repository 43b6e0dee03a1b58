"""Three nodes of RabbitMQ and a pair of Postgres, each behind one address, as a Service of Kubernetes is."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from deploy.local.machine.folders import Place, Report
from tests.harness import scratch
from tests.harness.rabbitmq_cluster import Cluster, three_nodes
from tests.harness.servers import Servers
from tests.harness.standby import Replicated, replicated
from tests.harness.tcp_proxy import TcpProxy


@dataclass(frozen=True)
class ClusteredServers(Servers):
    """All of them. `postgres` and `broker` are one of each; clients find the nodes in turn."""

    nodes: Cluster
    pair: Replicated
    to_postgres: TcpProxy


@asynccontextmanager
async def clustered_servers(report: Report) -> AsyncIterator[ClusteredServers]:
    """Start all of them on free ports of the loopback."""
    with scratch.folder() as folder, three_nodes(Place(folder=folder, report=report)) as nodes:
        async with (
            replicated() as pair,
            TcpProxy(pair.primary_url) as to_postgres,
            TcpProxy(nodes.nodes[0].url) as to_broker,
        ):
            to_broker.lead_to(*(node.url for node in nodes.nodes))
            urls = to_postgres.url, to_broker.url
            yield ClusteredServers(pair.primary, nodes.nodes[0], *urls, nodes, pair, to_postgres)
