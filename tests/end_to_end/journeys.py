"""The journey of `make run`, as its tests see it."""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.harness.processes import Process

# The types of the events of a request that was clicked through after a failed e-mail, in order.
EVENTS = [f"request.{name}" for name in ("created", "email_failed", "corrected", "email_sent", "calculated")]


@dataclass(frozen=True)
class JourneyStack:
    """The pages, and what they need."""

    pages: Process
    api: Process
    worker: Process
    mails: Path
    environment: Mapping[str, str]  # of the pages

    @property
    def logs(self) -> str:
        """What all processes have logged."""
        return self.pages.output + self.api.output + self.worker.output


def link_in(email: str) -> str:
    """Return the link of an e-mail's HTML, with the secret."""
    (link,) = re.findall('href="([^"]+)"', email)
    return html.unescape(link)
