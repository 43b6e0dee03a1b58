"""What a worker process loads."""

import subprocess
import sys

WEB = {"cachetools", "httpx", "jwt", "litestar"}


def test_worker_loads_no_web_framework_http_client_or_jwt():
    program = f"import sys, worker.__main__; print(sorted({WEB} & sys.modules.keys()))"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert ended.stdout.strip() == "[]"
