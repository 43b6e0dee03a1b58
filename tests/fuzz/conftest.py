"""A real API process to fuzz, and for how long: briefly in `make test`, for long in `make fuzz`."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from service.settings import ServiceSettings
from tests.harness.processes import Process, api_process, started

LONG = os.environ.get("FUZZ") == "long"

collect_ignore = [] if LONG else ["test_linters.py"]  # npx downloads those linters


@pytest.fixture
async def api(service_settings: ServiceSettings, tmp_path: Path) -> AsyncIterator[Process]:
    """An API on the test's database, ready."""
    process = api_process(service_settings, tmp_path, LOG_LEVEL="WARNING")
    async with started(process):
        yield process
