"""Fixtures: a place for servers, and the lines reported to it."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.local.machine import waiting
from deploy.local.machine.folders import Place


@dataclass
class Reports:
    """Collects the reported lines."""

    lines: list[str] = field(default_factory=list)

    def __call__(self, line: str) -> None:
        """Collect one line."""
        self.lines.append(line)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def place(tmp_path: Path, reports: Reports) -> Place:
    return Place(folder=tmp_path / "servers", keep=False, report=reports)


@pytest.fixture
def without_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the URLs, the images and the Docker engine of this machine."""
    for variable in ("DATABASE_URL", "AMQP_URL", "TEST_POSTGRES_IMAGE", "TEST_RABBITMQ_IMAGE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine.sock")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the user have asked for the end."""
    monkeypatch.setattr(waiting, "_end_asked_for", True)
