"""The whole service on this machine: `make run`, and the servers for tests."""
