"""The whole service on this machine: `make run`, `make demo`, and the servers of the tests."""
