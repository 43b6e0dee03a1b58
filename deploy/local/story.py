"""What happens to requests, one line each, from the logs of API and worker."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from deploy.local.mail_catcher import newest


class Story:
    """Reads the logs on from where the last call stopped."""

    def __init__(self, folder: Path) -> None:
        self._mail = folder / "mail"
        self._logs = [(folder / "logs" / name).open("rb") for name in ("api.log", "worker.log")]

    def go_on(self) -> Iterator[str]:
        """Yield what has happened since the last call."""
        for log in self._logs:
            for line in log:
                if not line.endswith(b"\n"):
                    log.seek(-len(line), 1)  # The rest is not written yet.
                    break
                with suppress(ValueError):  # A line may be a traceback, or in the form for people.
                    yield from self._told(json.loads(line))

    def _told(self, logged: Mapping[str, Any]) -> Iterator[str]:
        match logged:
            case {"event": "request_served", "method": "POST", "status": 200, "uuid": uuid}:
                yield f"{uuid}: stored"
            case {"event": "email_handled", "outcome": "sent", "uuid": uuid}:
                found = newest(self._mail, uuid)
                yield f"{uuid}: e-mailed, {found[0] if found else ''}"
            case {"event": "email_handled", "outcome": outcome, "smtp_code": code, "uuid": uuid}:
                yield f"{uuid}: e-mail {outcome}, reply {code}"
            case {"event": "message_handled", "calculation_id": calculation_id, "uuid": uuid}:
                yield f"{uuid}: calculated, {calculation_id}"
