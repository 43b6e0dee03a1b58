"""Every fault that the harness can inject. A new module of faults is imported here."""

from tests.faults.catalogue import broker as broker
from tests.faults.catalogue import clocks as clocks
from tests.faults.catalogue import cluster as cluster
from tests.faults.catalogue import connections as connections
from tests.faults.catalogue import floods as floods
from tests.faults.catalogue import mail_server as mail_server
from tests.faults.catalogue import malformed as malformed
from tests.faults.catalogue import postgres as postgres
from tests.faults.catalogue import processes as processes
