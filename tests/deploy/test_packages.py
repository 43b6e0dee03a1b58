"""Debian packages are downloaded and unpacked, and their programs run from where they are unpacked."""

import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pytest

from deploy.local.errors import LocalStackError
from deploy.local.machine import packages

pytestmark = pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs Debian's apt")

# On every Debian; the sources of these tests have another version.
INSTALLED = "base-passwd"
DOWNLOADING = "Downloading Debian's package greeting, which may take minutes …"


@dataclass(frozen=True)
class Sources:
    """The sources of apt: a folder with packages, unless a test names others."""

    folder: Path

    def use(self, *lines: str) -> None:
        """Replace the sources."""
        (self.folder / "sources.list").write_text("".join(f"deb [trusted=yes] {line} ./\n" for line in lines))

    def add(self, name: str, *, depends: str = "") -> None:
        """Add a package with a program that prints the package's name."""
        tree = self.folder / f"{name}-tree"
        (tree / "DEBIAN").mkdir(parents=True)
        control = [f"Package: {name}", "Version: 1:99", "Architecture: all"]
        control += ["Maintainer: nobody <nobody@example.com>", "Description: made for a test"]
        control += [f"Depends: {depends}"] if depends else []
        (tree / "DEBIAN" / "control").write_text("\n".join([*control, ""]))
        program = tree / "usr" / "bin" / f"say-{name}"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho {name}\n")
        program.chmod(0o755)
        archive = self.folder / f"{name}.deb"
        build = ["dpkg-deb", "--root-owner-group", "-b", str(tree), str(archive)]
        subprocess.run(build, check=True, capture_output=True)
        content = archive.read_bytes()
        control += [f"Filename: ./{archive.name}", f"Size: {len(content)}"]
        control += [f"SHA256: {sha256(content).hexdigest()}"]
        with (self.folder / "Packages").open("a") as index:
            index.write("\n".join([*control, "", ""]))


@pytest.fixture
def sources(tmp_path, monkeypatch):
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "apt.conf").write_text(
        f'Dir::Etc::sourcelist "{folder}/sources.list";\nDir::Etc::sourceparts "{folder}/none";\n'
    )
    monkeypatch.setenv("APT_CONFIG", str(folder / "apt.conf"))
    made = Sources(folder)
    made.use(f"copy:{folder}")
    return made


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "packages"


@pytest.fixture
def silent_server():
    """The URL of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_installed_program_is_used(folder, reports):
    found = packages.command("dpkg", package="dpkg", report=reports, folder=folder)

    assert found == [shutil.which("dpkg")]
    assert not folder.exists()


def test_missing_program_runs_from_its_package_with_dependencies_that_are_not_installed(
    sources, folder, reports
):
    sources.add("greeting", depends=f"manners, {INSTALLED}")
    sources.add("manners")
    sources.add(INSTALLED)

    command = packages.command("say-greeting", package="greeting", report=reports, folder=folder)

    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "greeting\n"
    assert programs_in(folder / "greeting") == {"say-greeting", "say-manners"}
    assert reports.lines == [DOWNLOADING]


def test_two_at_once_download_once(sources, folder, reports):
    sources.add("greeting")

    with ThreadPoolExecutor(2) as threads:
        one, other = (
            threads.submit(packages.unpacked, "greeting", report=reports, folder=folder) for _ in range(2)
        )

    assert one.result() == other.result()
    assert programs_in(one.result()) == {"say-greeting"}
    assert reports.lines.count(DOWNLOADING) == 1


def test_interrupted_download_leaves_nothing_that_looks_like_the_package(
    sources, folder, reports, silent_server
):
    sources.add("greeting")
    sources.use(silent_server)
    with pytest.raises(LocalStackError, match="`apt-get update` did not end within 0 seconds"):
        packages.unpacked("greeting", report=reports, folder=folder, seconds=0.2)
    half = folder / "greeting.unfinished" / "usr" / "bin" / "half-written"
    half.parent.mkdir(parents=True)
    half.touch()

    assert not (folder / "greeting").exists()
    sources.use(f"copy:{sources.folder}")
    assert programs_in(packages.unpacked("greeting", report=reports, folder=folder)) == {"say-greeting"}


def test_without_apt_the_error_says_so(folder, reports, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(LocalStackError, match=r"^greeting is missing, and .* only with Debian's apt"):
        packages.unpacked("greeting", report=reports, folder=folder)


def programs_in(root: Path) -> set[str]:
    return {program.name for program in (root / "usr" / "bin").iterdir()}
