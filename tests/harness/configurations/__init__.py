"""Configurations of programs that the tests start."""

from pathlib import Path
from string import Template


def configuration(file: str, **values: object) -> str:
    """Return a file of this folder with *values* in place of $names."""
    return Template((Path(__file__).parent / file).read_text()).substitute(values)
