"""Fixtures: a place for servers, and the lines reported to it."""

from pathlib import Path

import pytest

from deploy.local.machine.folders import Place


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def place(tmp_path: Path, reports: list[str]) -> Place:
    return Place(folder=tmp_path / "servers", report=reports.append)
