"""The calls that README.md and service/README.md begin with: run as printed, they lead to an e-mail."""

import asyncio
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from deploy.local import environment
from deploy.local.machine.processes import run_command
from tests.deploy.mail_catching import mail_catcher
from tests.deploy.pages import API, README, code_blocks
from tests.harness.processes import started, worker_process

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


async def test_first_calls_are_answered_and_lead_to_one_email_each_that_only_its_owner_can_read(
    *, api, worker_settings, issuer, tmp_path
):
    mails = tmp_path / "mails"
    mails.mkdir(mode=0o755)
    (tmp_path / ".local").mkdir()
    variables = {
        "BASE_URL": api.base_url,
        "ACCESS_TOKEN": issuer.token(),
        "MAIL_DIR": str(mails),
    }
    environment.write(tmp_path / ".local" / "env", variables)
    calls = code_blocks(README, "Two commands", "sh")[-1]
    (more_calls,) = code_blocks(API, "First call to first e-mail", "sh")

    with mail_catcher(mails) as port:
        worker = worker_process(worker_settings, tmp_path, SMTP_URL=f"smtp://127.0.0.1:{port}")
        async with started(api, worker):
            first, again = [await run(block, tmp_path) for block in (calls + more_calls, calls)]

    for printed, answered in ((first, 4), (again, 1)):
        assert len(re.findall(r'"code": ?200,', printed)) == answered
        assert printed.count("\nTo: Ada Lovelace <ada@example.com>") == 1
        assert len(uuids(printed)) == 1
    assert max(map(len, first.splitlines())) < 5_000, "hides the rest"
    assert uuids(first) != uuids(again)
    assert first.count("\nidempotent-replayed: true") == 1
    assert '"type":"request.created"' in first
    assert first.count('"code":"required"') == 8
    assert {stat.S_IMODE(path.stat().st_mode) for path in (mails, *mails.iterdir())} == {0o700, 0o600}
    assert len(list(mails.iterdir())) == 2


async def run(block: str, folder: Path) -> str:
    """Return what the block of a page printed, beside a stack described by `.local/env` in *folder*."""
    shell = ("sh", "-euc", block)
    return await asyncio.to_thread(
        run_command, "sh", shell, environment=os.environ, folder=folder, seconds=60
    )


def uuids(printed: str) -> set[str]:
    return set(re.findall(r'"uuid": ?"(\w+)"', printed))
