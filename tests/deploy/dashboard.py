"""The dashboard: its rows, panels and queries."""

from typing import Any

import msgspec

from deploy.local.machine.folders import CHECKOUT

FILE = CHECKOUT / "deploy" / "k8s" / "components" / "monitoring" / "dashboard.json"
TOP: list[dict[str, Any]] = msgspec.json.decode(FILE.read_bytes())["panels"]
ROWS = [panel for panel in TOP if panel["type"] == "row"]
PANELS = [panel for each in TOP for panel in (each, *each.get("panels", ())) if panel["type"] != "row"]
QUERIES: list[str] = [target["expr"] for panel in PANELS for target in panel["targets"]]


def filled_in(query: str, namespace: str = ".*") -> str:
    """Return a query with its variables filled in, as Grafana does."""
    values = {"$__rate_interval": "1m", "$job": "(.*/)?calculation-requests", "$namespace": namespace}
    for name, value in values.items():
        query = query.replace(name, value)
    return query
