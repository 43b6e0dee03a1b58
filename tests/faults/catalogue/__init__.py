"""Every fault that the harness can inject. A new module of faults is imported here."""

from tests.faults.catalogue import cluster, connections, floods, processes, servers  # noqa: F401
