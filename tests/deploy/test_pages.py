"""The pages agree with the code: their links lead somewhere, and their tables are complete."""

from pathlib import Path

import msgspec
import pytest

from deploy.local.machine.folders import CHECKOUT
from service.settings import ServiceSettings, Settings
from tests.deploy.pages import anchors, links, settings_listed
from worker.settings import WorkerSettings

_PAGES = [
    CHECKOUT / "README.md",
    *sorted(CHECKOUT.glob("[!.]*/*.md")),
    *sorted(CHECKOUT.glob("tests/*/README.md")),
]
# Settings without a default that need not be set, with what the page has in place of one.
_OPTIONAL = {
    "AUTH_INTERNAL_CLIENTS": "none",
    "AUTH_TOKEN_URL": "none",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "none",
    "LISTEN_DATABASE_URL": "DATABASE_URL",
    "RETENTION_DAYS": "none",
    "SMTP_HELO_NAME": "none",
}


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page):
    assert [link for link in links(page) if not _leads_somewhere(page, link)] == []


@pytest.mark.parametrize(
    ("process", "settings", "without"),
    [
        ("both processes", Settings, None),
        ("API", ServiceSettings, Settings),
        ("worker", WorkerSettings, Settings),
    ],
)
def test_every_setting_is_listed_once_with_its_default(process, settings, without):
    expected = _defaults(settings)
    for name in _defaults(without) if without else ():
        del expected[name]

    assert sorted(settings_listed(process)) == sorted(expected.items())


def _defaults(settings: type[Settings]) -> dict[str, str]:
    return {field.encode_name: _shown(field) for field in msgspec.structs.fields(settings)}


def _shown(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return ""
    if field.default in {None, ""}:
        return _OPTIONAL[field.encode_name]
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))
