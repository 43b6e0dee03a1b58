"""Which tests may be skipped in CI: with STRICT_SKIPS set, any other skip is a failure."""

import os

_ALLOWED = (
    # Debian 12 has no package with a kubectl that renders the overlays.
    "neither kubectl nor kustomize is installed",
    # Only the tests of the calls on the pages need it.
    "curl is not installed",
    # Only the test of `operate` needs it.
    "jq is not installed",
    # Only the tests of pages need it, and not every system has a package of it.
    "Chromium is missing",
    "Playwright is installed by `make test-long`",
    # Its processes switch to other users.
    "Postfix starts only as root",
    # CI needs no Docker engine.
    "no Docker engine answers",
    "Docker Compose is not installed",
    # `make test-long` installs these if there is node.
    "oidc-provider is not installed",
    "TypeScript is not installed",
    # Only the tests of openapi-generator need it.
    "Java is not installed",
    # `make deploy-check` installs it and runs this test.
    "AsyncAPI's parser is not installed",
)


def is_forbidden(reason: str) -> bool:
    """Whether a test that was skipped for *reason* has failed."""
    return bool(os.environ.get("STRICT_SKIPS")) and not any(each in reason for each in _ALLOWED)
