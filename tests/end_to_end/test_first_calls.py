"""The calls that the pages begin with: run as they are printed, they lead to an e-mail."""

import asyncio
import re
import shutil
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.local import environment
from deploy.local.machine.folders import CHECKOUT
from service.authentication import api_keys
from tests.deploy.mail_catching import mail_catcher
from tests.deploy.pages import code_blocks
from tests.harness.examples import CONVEYANCER
from tests.harness.processes import started, worker_process
from tests.harness.waiting import eventually

RunBlock = Callable[[str], Awaitable[str]]

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@pytest.fixture
def mails(tmp_path):
    """The folder of the mail catcher."""
    return tmp_path / "mails"


@pytest.fixture
async def run_block(*, api, worker_settings, issuer, database, mails, tmp_path):
    """Runs a block of a page beside a stack described by `.local/env`, and returns what it printed."""
    (tmp_path / ".local").mkdir()
    key = await api_keys.create(database, CONVEYANCER)
    variables = {
        "BASE_URL": api.base_url,
        "ACCESS_TOKEN": issuer.token(),
        "API_KEY": key,
        "MAIL_DIR": str(mails),
    }
    environment.write(tmp_path / ".local" / "env", variables)

    async def run(block: str) -> str:
        shell = await asyncio.create_subprocess_exec(
            "sh", "-euc", block, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        async with asyncio.timeout(60):
            return (await shell.communicate())[0].decode()

    with mail_catcher(mails) as port:
        worker = worker_process(replace(worker_settings, smtp_url=f"smtp://127.0.0.1:{port}"), tmp_path)
        async with started(api, worker):
            yield run


async def test_first_calls_of_the_page_for_callers_lead_to_one_email(run_block, mails):
    (block,) = code_blocks(CHECKOUT / "service" / "README.md", "First call to first e-mail", "sh")

    first, second = [await run_block(block) for _ in range(2)]

    assert first.count('"status":{"code":200,"message":"OK"}') == 2
    assert "To: Ada Lovelace <ada@example.com>" in first
    assert uuids(second) == uuids(first)
    assert len(files_in(mails)) == 1


async def test_first_calls_of_the_front_page_are_answered_and_lead_to_an_email(run_block, mails):
    block = code_blocks(CHECKOUT / "README.md", "Two commands", "sh")[-1]

    printed = await run_block(block)

    assert printed.count('"status":{"code":200,"message":"OK"}') == 2
    await eventually(lambda: files_in(mails))


def uuids(printed: str) -> set[str]:
    return set(re.findall(r'"uuid":"(\w+)"', printed))


def files_in(folder: Path) -> list[Path]:
    return list(folder.glob("*.eml"))
