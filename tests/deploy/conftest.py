"""Fixtures: a place for servers, and the lines reported to it."""

import pytest

from deploy.local.machine.folders import Place


@pytest.fixture
def reports():
    return []


@pytest.fixture
def place(tmp_path, reports):
    return Place(folder=tmp_path / "servers", report=reports.append)
