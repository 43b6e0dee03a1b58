"""Debian packages, unpacked into `.local/packages`, which needs no root.

`python -m deploy.local.machine.packages NAME` unpacks a package and prints its folder.
"""

import os
import shutil
import sys
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Report, claimed
from deploy.local.machine.processes import run_command

PACKAGES = LOCAL / "packages"
_SECONDS = 720.0
# No dependencies among them: apt would first want to repair those of other packages that are not met.
_STATUS_FIELDS = ("Package:", "Status:", "Architecture:", "Multi-Arch:", "Version:", "Provides:")
# An update that fails matters only if the package is in the source that failed.
_UNPACK = """
apt-get -q "$@" update || true
apt-get -q -y "$@" install --download-only --no-install-recommends "$0"
for archive in apt/archives/*.deb; do
    dpkg -x "$archive" "$0.unfinished"
    rm "$archive"
done
"""


def library_path(folder: Path) -> str:
    """Return the LD_LIBRARY_PATH with which programs find the libraries unpacked beside them."""
    paths = [str(path) for lib in ("lib", "usr/lib") for path in folder.glob(f"{lib}/*-linux-gnu*")]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return ":".join([*paths, *([inherited] if inherited else [])])


def unpacked(package: str, *, report: Report = print) -> Path:
    """Return a folder that holds *package* and those of its dependencies that are not installed.

    The first call downloads them; calls at the same time wait for it. Raises LocalStackError.
    """
    target = PACKAGES / package
    if target.exists():
        return target
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise LocalStackError(f"{package} is missing, and can be downloaded only with Debian's apt.")
    # A server started by another thread meanwhile would hold the lock for as long as it runs.
    with claimed(PACKAGES / "apt", seconds=2 * _SECONDS, inherited=False):
        if not target.exists():
            report(f"Downloading Debian's package {package}, which may take minutes …")
            _unpack(package, _installed(except_for=package))
            # Renamed when complete: an interrupted run leaves nothing that looks like the package.
            target.with_name(f"{package}.unfinished").rename(target)
    return target


def _installed(*, except_for: str) -> str:
    """Return what is installed, as in dpkg's status file, except for packages whose names start like that."""
    # An installed Erlang finds only its own modules.
    left_out = (f"Package: {except_for}", "Package: erlang-")
    packages = Path("/var/lib/dpkg/status").read_text().split("\n\n")
    kept = (package for package in packages if not package.startswith(left_out))
    fields = ((line for line in package.splitlines() if line.startswith(_STATUS_FIELDS)) for package in kept)
    return "\n\n".join(map("\n".join, fields)) + "\n"


def _unpack(package: str, installed: str) -> None:
    """Unpack *package* and its dependencies, from the sources that apt has here."""
    apt = PACKAGES / "apt"
    for old in (apt / "archives", PACKAGES / f"{package}.unfinished"):
        shutil.rmtree(old, ignore_errors=True)
    for made in (apt / "lists" / "partial", apt / "archives" / "partial"):
        made.mkdir(parents=True, exist_ok=True)
    (apt / "status").write_text(installed)
    options = {
        "Dir::State": apt,
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "APT::Sandbox::User": "root",  # Root's apt would switch to a user who may not enter the checkout.
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "20",
        "Acquire::https::Timeout": "20",
    }
    run_command(
        f"apt-get install {package}",
        ["sh", "-euc", _UNPACK, package, *(f"-o{name}={value}" for name, value in options.items())],
        folder=PACKAGES,
        seconds=_SECONDS,
    )


if __name__ == "__main__":
    try:
        print(unpacked(sys.argv[1], report=lambda line: print(line, file=sys.stderr)))
    except LocalStackError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
