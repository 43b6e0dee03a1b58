"""Where servers of the tests keep their data: in memory where there is room, else in .local."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deploy.local.machine.folders import LOCAL

_MEMORY = Path("/dev/shm")  # noqa: S108 - the folder below it belongs to this user alone
_ROOM = 2 * 1024**3


@contextmanager
def folder() -> Iterator[Path]:
    """Yield the folder. Servers make folders of their own in it, and remove those of runs that died."""
    if not _MEMORY.is_dir() or shutil.disk_usage(_MEMORY).free < _ROOM:
        yield LOCAL / "tests"
        return
    in_memory = _MEMORY / f"calculation-requests-tests-{os.getuid()}"
    with suppress(FileExistsError):  # `exist_ok` fails if another process removes the folder at this moment.
        in_memory.mkdir(mode=0o700)
    try:
        yield in_memory
    finally:
        with suppress(OSError):  # Another process uses it.
            in_memory.rmdir()
