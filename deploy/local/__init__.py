"""The whole service on this machine: `make run`, `make demo`, and the servers for tests."""
