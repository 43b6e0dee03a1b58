"""Serves the journey on the loopback interface until SIGTERM: `python -m deploy.local.journey`."""

import os

import msgspec
import uvicorn

from deploy.local.journey.app import create_app
from deploy.local.journey.resources import Settings

if __name__ == "__main__":
    settings = msgspec.convert(dict(os.environ), Settings, strict=False)
    # No access log of uvicorn's, because it would have the queries, and so the secrets.
    uvicorn.run(create_app(settings), port=settings.port, access_log=False, log_level="warning")
