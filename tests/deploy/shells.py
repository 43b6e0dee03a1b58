"""What a shell has in its environment."""

import subprocess
from pathlib import Path


def sourced(file: Path) -> dict[str, str]:
    """Return the environment of a shell that has sourced a file."""
    command = ["sh", "-euc", '. "$0"; exec env -0', str(file)]
    printed = subprocess.run(command, capture_output=True, check=True).stdout
    return dict(entry.split("=", 1) for entry in printed.decode().split("\0") if "=" in entry)
