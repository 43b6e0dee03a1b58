"""The pages agree with the code: their links lead somewhere, and their tables are complete."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import msgspec
import pytest

import service.__main__
import worker.__main__
from deploy.local.machine.folders import CHECKOUT
from service import app
from service.settings import ServiceSettings, Settings
from tests.deploy.pages import API, OPERATING, README, REFERENCE, anchors, prose, rows
from worker.process import ROLES

_PAGES = [*sorted(CHECKOUT.glob("*.md")), *sorted(CHECKOUT.glob("[!.]*/*.md"))]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(CHECKOUT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", prose(page))

    assert [link for link in links if "://" not in link and not _leads_somewhere(page, link)] == []


@pytest.mark.parametrize(
    ("process", "settings"),
    [
        ("both processes", [Settings]),
        ("API", [ServiceSettings]),
        ("worker", [role.settings for role in ROLES.values()]),
    ],
)
def test_every_setting_is_listed_once_with_its_default(process, settings):
    of_both = _defaults(Settings).items() if settings != [Settings] else set()
    expected = set().union(*(_defaults(each).items() for each in settings)) - of_both

    listed = rows(REFERENCE, "Settings", process)
    assert sorted((name.strip("`"), default.strip("`")) for name, default, _ in listed) == sorted(expected), (
        REFERENCE
    )


def test_every_process_is_listed():
    listed = [command for command, *_ in rows(README, "The processes", "command")]

    assert listed == ["`python -m service serve`", *(f"`python -m worker {role}`" for role in ROLES)]


@pytest.mark.parametrize(
    ("process", "program", "left_out"),
    [("service", service.__main__.PROGRAM, ()), ("worker", worker.__main__.PROGRAM, ROLES)],
)
def test_every_command_is_listed_with_its_options(process, program, left_out):
    choice = OPERATING.read_text().partition("\nCHOICE combines")[2].partition("\n\n")[0].replace("`", "")
    listed: dict[str, set[str]] = {}
    command = ""
    for usages, _ in rows(OPERATING, "Commands", f"`{process}`"):
        # The words of a command, and its arguments.
        for name, arguments in re.findall(
            r"`((?:[a-z][a-z-]* ?)*)([^`]*)`", usages.replace("CHOICE", choice)
        ):
            command = name.strip() or command
            listed.setdefault(command, set()).update(re.findall("--[a-z-]+", arguments))

    assert listed == {name: options for name, options in _commands(program) if name not in left_out}


def test_every_endpoint_is_listed_with_its_query_and_its_scopes():
    document = app.describe()
    endpoints = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            query = {each["name"] for each in operation["parameters"] if each.get("in") == "query"}
            scopes = {scope for each in operation["security"] for scope in chain(*each.values())}
            endpoints[f"{method.upper()} {path}"] = (query, scopes)

    listed = {
        call.replace(":uuid", "{uuid}"): (
            set(re.findall(r"(\w+)=", query)),
            set(re.findall("request:[a-z-]+", needs)),
        )
        for cell, needs, _ in rows(API, "Endpoints", "| needs")
        for call, query in re.findall(r"`([A-Z]+ /v1/[^`?]+)\??([^`]*)`", cell)
    }
    assert listed == endpoints, "service/README.md, Endpoints"


def _commands(group: click.Group, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield every command of a program with its options, but for those that the pages name once for all."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path}{name} ")
            continue
        options = [each for each in command.params if isinstance(each, click.Option)]
        names = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        yield f"{path}{name}", names - {"--json", "--by", "--note"}


def _defaults(settings: type[Settings]) -> dict[str, str]:
    """Return each setting's default as a page shows it."""
    fallbacks = {"LISTEN_DATABASE_URL": "DATABASE_URL"}  # The page says "none" for any other without a value.
    defaults = {}
    for field in msgspec.structs.fields(settings):
        default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        shown = fallbacks.get(field.encode_name, "none") if field.default in {None, ""} else default
        defaults[field.encode_name] = "" if field.required else shown
    return defaults


def _leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))
