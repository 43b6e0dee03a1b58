"""Prometheus's own tool for checks and unit tests of rules."""

import functools
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages


def promtool(*words: str | Path) -> str:
    """Run promtool, which must succeed, and return its output. Skips the test where there is none."""
    command = _command()
    if isinstance(command, LocalStackError):
        pytest.skip(f"promtool is missing: {command}")
    ended = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@functools.cache
def _command() -> Sequence[str] | LocalStackError:
    """Return the command, or why there is none."""
    try:
        return packages.command("promtool", package="prometheus", report=print)
    except LocalStackError as reason:
        return reason


def check_rules(groups: Any, folder: Path) -> str:
    """Check the syntax of rule groups. Warnings, for instance about duplicates, are errors."""
    rules = written(folder / "rules.json", {"groups": groups})
    return promtool("check", "rules", "--lint=all", "--lint-fatal", rules)


def written(file: Path, content: Any) -> Path:
    """Write JSON, which is also YAML."""
    file.write_bytes(msgspec.json.encode(content))
    return file
