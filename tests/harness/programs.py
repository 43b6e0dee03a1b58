"""Programs that come from Debian's packages."""

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages


def debian_program(program: str, *, package: str | None = None) -> list[str]:
    """Return the command that runs *program*, of the package of that name or of *package*.

    Skips the test if the program is neither installed nor to be downloaded.
    """
    try:
        return packages.command(program, package=package or program)
    except LocalStackError as reason:
        pytest.skip(f"{program} is missing: {reason}")
