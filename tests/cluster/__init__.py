"""Faults in a Kubernetes cluster under load. `make cluster-check` injects them."""
