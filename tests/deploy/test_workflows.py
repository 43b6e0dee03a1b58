"""The workflows of .github."""

import re
from typing import Any

import msgspec

from deploy.local.machine.folders import CHECKOUT


def test_job_that_can_sign_a_release_runs_no_code_of_the_checkout():
    jobs: dict[str, Any] = {}
    for file in (CHECKOUT / ".github/workflows").glob("*.yml"):
        jobs |= msgspec.yaml.decode(file.read_bytes())["jobs"]
    signing = [job for job in jobs.values() if "write" in job["permissions"].values()]

    assert len(signing) == 1
    commands = "\n".join(step.get("run", "") for step in signing[0]["steps"])
    assert "cosign sign" in commands
    assert not re.search(r"\bmake\b|python|pip\b|npm|kubectl|\./|\.github", commands)
