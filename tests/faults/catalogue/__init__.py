"""Every fault that the harness can inject. A new module of faults is imported here."""

from tests.faults.catalogue import floods, processes, servers  # noqa: F401
from tests.faults.world import CLUSTER_FAULTS as CLUSTER_FAULTS
from tests.faults.world import FAULTS as FAULTS
