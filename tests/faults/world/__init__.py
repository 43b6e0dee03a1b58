"""What faults are injected into: servers, processes, other teams, and the load on all of them."""
