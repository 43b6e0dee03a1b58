"""The length of the model tests: `--model-examples`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model-examples", default="15", help="how many histories the model tests try")
