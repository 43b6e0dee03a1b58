"""The calls that the pages begin with and `make run` prints: run as printed, they lead to an e-mail."""

import asyncio
import os
import re
import shutil
import stat
from pathlib import Path

import pytest

from deploy.local import environment, example
from deploy.local.machine.folders import CHECKOUT
from deploy.local.machine.processes import run_command
from service.authentication import api_keys
from tests.deploy.mail_catching import mail_catcher
from tests.deploy.pages import code_blocks
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


async def test_printed_calls_are_answered_and_lead_to_one_email_each_that_only_its_owner_can_read(
    *, api, worker_settings, issuer, database, tmp_path
):
    mails = tmp_path / "mails"
    mails.mkdir(mode=0o755)
    (tmp_path / ".local").mkdir()
    variables = {
        "BASE_URL": api.base_url,
        "ACCESS_TOKEN": issuer.token(),
        "API_KEY": await api_keys.create(database, CONVEYANCER),
        "MAIL_DIR": str(mails),
    }
    environment.write(tmp_path / ".local" / "env", variables)
    (of_callers,) = code_blocks(CHECKOUT / "service" / "README.md", "First call to first e-mail", "sh")
    of_front_page = code_blocks(CHECKOUT / "README.md", "Two commands", "sh")[-1]

    with mail_catcher(mails) as port:
        worker = worker_process(worker_settings, tmp_path, SMTP_URL=f"smtp://127.0.0.1:{port}")
        async with started(api, worker):
            first, repeated = [await run(of_callers, tmp_path) for _ in range(2)]
            mailed = len(list(mails.iterdir()))
            others = [await run(of_front_page, tmp_path)]
            others += [await run(example.commands(".local/env", "mails"), tmp_path)]
            await eventually(lambda: len(list(mails.glob("*.eml"))) == mailed + 2)

    assert mailed == 1
    assert "To: Ada Lovelace <ada@example.com>" in first
    answered = [
        printed.count('"status":{"code":200,"message":"OK"}') for printed in (first, repeated, *others)
    ]
    assert answered == [2, 2, 2, 3]
    assert [len(uuids(printed)) for printed in (first + repeated, *others)] == [1, 1, 1]
    assert "\nTo: " in others[1]
    assert {stat.S_IMODE(path.stat().st_mode) for path in (mails, *mails.iterdir())} == {0o700, 0o600}


async def run(block: str, folder: Path) -> str:
    """Return what the block of a page printed, beside a stack described by `.local/env` in *folder*."""
    shell = ("sh", "-euc", block)
    return await asyncio.to_thread(
        run_command, "sh", shell, environment=os.environ, folder=folder, seconds=60
    )


def uuids(printed: str) -> set[str]:
    return set(re.findall(r'"uuid":"(\w+)"', printed))
