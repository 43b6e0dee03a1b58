"""The pages agree with the code: links lead somewhere, tables are complete, commands and SQL can be run."""

import re
from collections.abc import Iterator
from itertools import chain

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

PROGRAMS = {"service": service.__main__.PROGRAM, "worker": worker.__main__.PROGRAM}
FOR_OPERATORS = "\n".join(page.read_text() for page in sorted(OPERATING.parent.glob("*.md")))
# Words in capitals are for the reader to fill in.
EXAMPLES = {"UUID": "req_0000000000000000000000", "TIME": "2026-01-31T09:30:00Z"}
EXAMPLES |= {"QUEUE": "notifications", "ADDRESS": "ada@example.com"}


def test_links_lead_somewhere():
    for page in (*CHECKOUT.glob("*.md"), *CHECKOUT.glob("[!.]*/*.md")):
        for path, anchor in re.findall(r"\]\((?!\w+://)([^)#\s]*)#?([^)\s]*)\)", prose(page)):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page, path)
            assert not anchor or anchor in anchors(target), (page, path, anchor)


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

    listed = [[cell.strip("`") for cell in row[:2]] for row in rows(REFERENCE, "Settings", process)]
    assert sorted(listed) == sorted(map(list, expected)), REFERENCE


def _defaults(settings: type[Settings]) -> dict[str, str]:
    """Return each setting's default as a page shows it."""
    fallbacks = {"LISTEN_DATABASE_URL": "DATABASE_URL"}  # The page says "none" for any other without a value.
    defaults = {}
    for field in msgspec.structs.fields(settings):
        default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        shown = fallbacks.get(field.encode_name, "none") if field.default in {None, ""} else default
        defaults[field.encode_name] = "" if field.required else shown
    return defaults


def test_every_process_is_listed():
    listed = [command for command, *_ in rows(README, "The processes", "command")]
    assert listed == ["`python -m service serve`", *(f"`python -m worker {role}`" for role in ROLES)]


@pytest.mark.parametrize("process", PROGRAMS)
def test_every_command_is_listed_with_its_options(process):
    choice = OPERATING.read_text().partition("\nCHOICE combines")[2].partition("\n\n")[0].replace("`", "")
    words = r"`((?:[a-z][a-z-]* ?)*)([^`]*)`"  # of a command, and its arguments
    listed: dict[str, set[str]] = {}
    command = ""
    for usages, _ in rows(OPERATING, "Commands", f"`{process}`"):
        for name, arguments in re.findall(words, usages.replace("CHOICE", choice)):
            command = name.strip() or command
            listed.setdefault(command, set()).update(re.findall("--[a-z-]+", arguments))

    commands = dict(_commands(PROGRAMS[process]))
    assert listed == {name: commands[name] for name in commands.keys() - ROLES}


def _commands(group: click.Group, path: str = "") -> Iterator[tuple[str, set[str]]]:
    """Yield every command of a program with its options, but for those that the pages name once for all."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path}{name} ")
            continue
        options = [each for each in command.params if isinstance(each, click.Option)]
        names = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        yield f"{path}{name}", names - {"--json", "--by", "--note"}


def test_commands_for_operators_can_be_run():
    # Inline, or a line of a shell block. `…` stands for any command.
    command = r"(?m)(?:python -m|operate) ((?:service|worker) [^`\n…]+)(?:`|$)"
    commands = re.findall(command, FOR_OPERATORS)
    assert len(commands) > 20
    for command in commands:
        process, *words = [EXAMPLES.get(word, word) for word in command.split()]
        program: click.Command = PROGRAMS[process]
        while isinstance(program, click.Group):
            program = program.commands[words.pop(0)]
        program.make_context(program.name, words)


async def test_statements_for_operators_can_be_run(database):
    # Inline, or in a block.
    statements = re.findall(r"(?:`|```sql\n)((?:SELECT|ANALYZE) [^`]+)`", FOR_OPERATORS)
    assert len(statements) > 5
    for statement in statements:
        await database.execute(statement)


def test_every_endpoint_is_listed_with_its_query_and_its_scopes():
    endpoints, scope = {}, "request:[a-z-]+"
    for path, item in app.describe()["paths"].items():
        for method, operation in item.items():
            query = {each["name"] for each in operation["parameters"] if each.get("in") == "query"}
            scopes = {scope for each in operation["security"] for scope in chain(*each.values())}
            endpoints[f"{method.upper()} {path}"] = (query, scopes)

    listed = {
        call.replace(":uuid", "{uuid}"): ({*re.findall(r"(\w+)=", query)}, {*re.findall(scope, needs)})
        for cell, needs, _ in rows(API, "Endpoints", "| needs")
        for call, query in re.findall(r"`([A-Z]+ /v1/[^`?]+)\??([^`]*)`", cell)
    }
    assert listed == endpoints, "service/README.md, Endpoints"
