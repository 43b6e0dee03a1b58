"""Debian packages are downloaded and unpacked, and their programs run from where they are unpacked."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from deploy.local.machine import packages

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs Debian's apt")

# On every Debian; the sources of these tests have another version.
INSTALLED = "base-passwd"
DOWNLOADING = "Downloading Debian's package greeting, which may take minutes …"


def use(sources: Path, url: str) -> None:
    """Let apt have one source."""
    (sources / "sources.list").write_text(f"deb [trusted=yes] {url} ./\n")


def add(sources: Path, name: str, *, depends: str = "") -> None:
    """Add a package with a program that prints the package's name."""
    tree, archive = sources / f"{name}-tree", sources / f"{name}.deb"
    program = tree / "usr" / "bin" / f"say-{name}"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho {name}\n")
    program.chmod(0o755)
    control = [f"Package: {name}", "Version: 1:99", "Architecture: all"]
    control += ["Maintainer: nobody <nobody@example.com>", "Description: made for a test"]
    control += [f"Depends: {depends}"] if depends else []
    (tree / "DEBIAN").mkdir()
    (tree / "DEBIAN" / "control").write_text("\n".join([*control, ""]))
    build = ["dpkg-deb", "--root-owner-group", "-b", str(tree), str(archive)]
    subprocess.run(build, check=True, capture_output=True)
    content = archive.read_bytes()
    found = [f"Filename: ./{archive.name}", f"Size: {len(content)}", f"SHA256: {sha256(content).hexdigest()}"]
    with (sources / "Packages").open("a") as index:
        index.write("\n".join([*control, *found, "", ""]))


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder with packages, from which apt takes them."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{folder}/sources.list";\nDir::Etc::sourceparts "{folder}/none";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(folder / "apt.conf"))
    use(folder, f"copy:{folder}")
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "PACKAGES", tmp_path / "packages")
    return packages.PACKAGES


def test_missing_program_runs_from_its_package_with_dependencies_that_are_not_installed(
    sources, folder, reports
):
    add(sources, "greeting", depends=f"manners, {INSTALLED}")
    add(sources, "manners")
    add(sources, INSTALLED)

    command = packages.command("say-greeting", package="greeting", report=reports.append)

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "greeting\n"
    assert programs_in(folder / "greeting") == {"say-greeting", "say-manners"}
    assert reports == [DOWNLOADING]


@pytest.mark.usefixtures("folder")
def test_two_at_once_download_once(sources, reports):
    add(sources, "greeting")

    with ThreadPoolExecutor(2) as threads:
        one, other = (threads.submit(packages.unpacked, "greeting", report=reports.append) for _ in range(2))

    assert one.result() == other.result()
    assert programs_in(one.result()) == {"say-greeting"}
    assert reports.count(DOWNLOADING) == 1


def programs_in(root: Path) -> set[str]:
    return {program.name for program in (root / "usr" / "bin").iterdir()}
