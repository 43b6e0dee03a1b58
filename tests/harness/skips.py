"""Which tests may be skipped in CI: with STRICT_SKIPS set, any other skip is a failure."""

import os

_ALLOWED = (
    "neither kubectl nor kustomize is installed",  # Debian 12 has no package that renders the overlays.
    "curl is not installed",  # Only the tests of the calls on the pages need it.
    "jq is not installed",  # Only the test of `operate` needs it.
    "Chromium is missing",  # Not every system has a package of it.
    "Playwright is installed by `make test-long`",
    "Postfix starts only as root",  # Its processes switch to other users.
    "no Docker engine answers",  # CI needs none.
    "Docker Compose is not installed",
    "oidc-provider is not installed",  # `make test-long` installs it if there is node.
    "TypeScript is not installed",  # likewise
    "Java is not installed",  # Only the tests of openapi-generator need it.
    "AsyncAPI's parser is not installed",  # `make deploy-check` installs it, and runs its test.
)


def is_forbidden(reason: str) -> bool:
    """Whether a test that was skipped for *reason* has failed."""
    return bool(os.environ.get("STRICT_SKIPS")) and not any(each in reason for each in _ALLOWED)
