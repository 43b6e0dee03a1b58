"""Programs of Debian packages: as installed, else unpacked into `.local/packages`, which needs no root.

`python -m deploy.local.machine.packages NAME` unpacks a package and prints its folder.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from deploy.local.errors import LocalStackError
from deploy.local.machine.folders import LOCAL, Report, claimed
from deploy.local.machine.processes import run_command

PACKAGES = LOCAL / "packages"
_DOWNLOAD_SECONDS = 600.0
_UNPACK_SECONDS = 120.0
# No dependencies among them: apt would first want to repair those of other packages that are not met.
_STATUS_FIELDS = ("Package", "Status", "Architecture", "Multi-Arch", "Version", "Provides")


def command(program: str, *, package: str, report: Report, folder: Path = PACKAGES) -> list[str]:
    """Return the command that runs *program*: the installed one, else the one in *package*, unpacked.

    Raises LocalStackError.
    """
    installed = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin")
    if installed:
        return [installed]
    root = unpacked(package, report=report, folder=folder)
    found = shutil.which(program, path=f"{root}/usr/bin:{root}/usr/sbin")
    if found is None:
        raise LocalStackError(f"{program} is not in Debian's package {package}: install it yourself.")
    return ["env", f"LD_LIBRARY_PATH={library_path(root)}", found]


def library_path(folder: Path) -> str:
    """Return the LD_LIBRARY_PATH with which programs find the libraries unpacked beside them."""
    paths = [str(path) for lib in ("lib", "usr/lib") for path in folder.glob(f"{lib}/*-linux-gnu*")]
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return ":".join([*paths, *([inherited] if inherited else [])])


def unpacked(
    package: str,
    *,
    even_if_installed: str | None = None,
    report: Report,
    folder: Path = PACKAGES,
    seconds: float = _DOWNLOAD_SECONDS,
) -> Path:
    """Return a folder that holds *package* and those of its dependencies that are not installed.

    Dependencies whose names start with *even_if_installed* are in it in any case. The first call downloads
    them; calls at the same time wait for it. Raises LocalStackError.
    """
    target = folder / package
    if target.exists():
        return target
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise LocalStackError(f"{package} is missing, and can be downloaded only with Debian's apt.")
    # A server started by another thread meanwhile would hold the lock for as long as it runs.
    with claimed(folder / "apt.lock", seconds=2 * seconds, inherited=False):
        if not target.exists():
            report(f"Downloading Debian's package {package}, which may take minutes …")
            installed = _installed(except_for=(package, even_if_installed or package))
            _unpack(_download(package, installed, folder, seconds), target)
    return target


def _installed(*, except_for: tuple[str, ...]) -> str:
    """Return what is installed, as in dpkg's status file, except for packages whose names start like that."""
    shown = "".join(f"{name}: ${{{name}}}\\n" for name in _STATUS_FIELDS)
    query = ["dpkg-query", "--show", f"--showformat={shown}"]
    listing = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    wanted, lines = False, []
    for line in listing.stdout.splitlines():
        name, _, value = line.partition(": ")
        if name == "Package":
            wanted = not value.startswith(except_for)
            lines.append("")
        # Apt refuses fields without a value.
        if wanted and value:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _download(package: str, installed: str, folder: Path, seconds: float) -> Sequence[Path]:
    """Return the archives of *package* and its dependencies, from the sources that apt has here."""
    state, archives = folder / "apt" / "state", folder / "apt" / "cache" / "archives"
    shutil.rmtree(archives, ignore_errors=True)
    for made in (state / "lists" / "partial", archives / "partial"):
        made.mkdir(parents=True, exist_ok=True)
    (state / "status").write_text(installed)
    options = {
        "Dir::State": state,
        "Dir::State::status": state / "status",
        "Dir::Cache": archives.parent,
        "APT::Sandbox::User": "root",  # Root's apt would switch to a user who may not enter the checkout.
        "APT::Update::Error-Mode": "any",
        "Acquire::Languages": "none",
        "Acquire::Retries": "1",
        "Acquire::http::Timeout": "20",
        "Acquire::https::Timeout": "20",
    }
    apt_get = ("apt-get", "-q", "-y", *(f"-o{name}={value}" for name, value in options.items()))
    unreachable = None
    try:
        _run("apt-get update", (*apt_get, "update"), folder, seconds)
    except LocalStackError as error:
        unreachable = error  # It matters only if the package is in a source that failed.
    downloading = ("install", "--download-only", "--no-install-recommends", package)
    try:
        _run("apt-get install", (*apt_get, *downloading), folder, seconds)
    except LocalStackError as error:
        cause = unreachable or error
        raise LocalStackError(f"Debian's package {package} cannot be downloaded. {cause}") from None
    return list(archives.glob("*.deb"))


def _unpack(archives: Sequence[Path], target: Path) -> None:
    unfinished = target.with_name(f"{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for archive in archives:
        _run(f"dpkg -x {archive.name}", ("dpkg", "-x", archive, unfinished), archive.parent, _UNPACK_SECONDS)
        archive.unlink()
    # Renamed when complete: an interrupted run leaves nothing that looks like the package.
    unfinished.rename(target)


def _run(name: str, words: Sequence[str | Path], folder: Path, seconds: float) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    run_command(name, words, environment=environment, folder=folder, seconds=seconds)


if __name__ == "__main__":
    try:
        print(unpacked(sys.argv[1], report=lambda line: print(line, file=sys.stderr)))
    except LocalStackError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
