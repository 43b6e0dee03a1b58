"""Programs and libraries that come from Debian's packages, and their configurations."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages


def debian_program(program: str, *, package: str | None = None) -> list[str]:
    """Return the command of *program*, of its package or *package*. Skips the test if there is none."""
    with skip_without(program):
        return command_of(program, package=package or program)


def command_of(program: str, *, package: str) -> list[str]:
    """Return what `debian_program` does. Raises LocalStackError instead of a skip."""
    if installed := shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin"):
        return [installed]
    root = packages.unpacked(package)
    found = shutil.which(program, path=f"{root}/usr/bin:{root}/usr/sbin")
    assert found, f"{program} is not in Debian's package {package}"
    return ["env", f"LD_LIBRARY_PATH={packages.library_path(root)}", found]


def debian_package(package: str) -> Path:
    """Return the folder of an unpacked package: an installed one is not used. Skips the test without it."""
    with skip_without(package):
        return packages.unpacked(package)


def configuration(file: str, **values: object) -> str:
    """Return a file of `configurations` with *values* in place of $names."""
    return Template((Path(__file__).parent / "configurations" / file).read_text()).substitute(values)


def variables_of_clock(days: int) -> dict[str, str]:
    """Return the variables with which a process has a clock that is so many days ahead, or behind if < 0.

    Its monotonic clock is right. Raises LocalStackError if libfaketime cannot be downloaded.
    """
    found = packages.unpacked("libfaketime").glob("usr/lib/*/faketime/libfaketime.so.1")
    return {
        "LD_PRELOAD": str(next(found)),
        "FAKETIME": f"{days:+d}d",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DISABLE_SHM": "1",
    }


@contextmanager
def skip_without(name: str) -> Iterator[None]:
    """Skip the test if the block raises LocalStackError."""
    try:
        yield
    except LocalStackError as reason:
        pytest.skip(f"{name} is missing: {reason}")
