"""Linters from npm find no error in the OpenAPI document."""

import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from service import app

_NPX = shutil.which("npx") or ""


@pytest.mark.skipif(not _NPX, reason="there is no npx on this machine")
@pytest.mark.parametrize(
    "linter",
    [
        "@redocly/cli@2.77.0 lint --max-problems 1000 --config redocly.yaml",
        "@stoplight/spectral-cli@6.16.3 lint -F hint --ruleset spectral.yaml",
    ],
)
def test_linter_finds_nothing(tmp_path, linter):
    *words, rules = linter.split()
    document = tmp_path / "openapi.json"
    document.write_bytes(msgspec.json.encode(app.describe()))
    command = [_NPX, "--yes", *words, Path(__file__).with_name(rules), document.name]

    linted = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    said = linted.stdout + linted.stderr
    assert linted.returncode == 0, said
    assert "warning" not in said.replace("Deprecation warning: Node.js", ""), said
