"""Linters from npm find no error in the OpenAPI document."""

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from service.contracts import openapi

_FOLDER = Path(__file__).parent
_NPX = shutil.which("npx") or ""


@pytest.mark.skipif(not _NPX, reason="there is no npx on this machine")
@pytest.mark.parametrize("token_url", [None, "https://issuer.example.com/token"], ids=["bearer", "oauth2"])
@pytest.mark.parametrize(
    "command",
    [
        ["@redocly/cli@2.77.0", "lint", "--config", str(_FOLDER / "redocly.yaml"), "--max-problems", "1000"],
        ["@stoplight/spectral-cli@6.16.3", "lint", "--ruleset", str(_FOLDER / "spectral.yaml"), "-F", "hint"],
    ],
    ids=["redocly", "spectral"],
)
def test_linter_finds_nothing(tmp_path, command, token_url):
    document = tmp_path / "openapi.json"
    document.write_bytes(msgspec.json.encode(openapi.document(token_url)))

    linted = subprocess.run(
        [_NPX, "--yes", *command, document.name], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    said = linted.stdout + linted.stderr
    assert linted.returncode == 0, said
    assert "warning" not in said.replace("Deprecation warning: Node.js", ""), said
    print(command[0], "finds no error and no warning")
