"""What the pages say: their links, and their tables of settings, metrics, commands and endpoints."""

import re
from pathlib import Path

from deploy.local.machine.folders import CHECKOUT

README = CHECKOUT / "README.md"
API = CHECKOUT / "service" / "README.md"
WORKER = CHECKOUT / "worker" / "README.md"
INSTALLATION = CHECKOUT / "deploy" / "README.md"
RUNBOOK = CHECKOUT / "deploy" / "runbook.md"
REFERENCE = CHECKOUT / "deploy" / "reference.md"

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
_CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_METRIC = re.compile(r"`([a-z_]+)(?:\{([a-z,]+)\})?`")
_USAGE = re.compile(r"`((?:[a-z][a-z-]* ?)*)([^`]*)`")  # the words of a command, and its arguments
_SCOPE = re.compile(r"request:[a-z-]+")


def links(page: Path) -> list[str]:
    """Return where the links of a page lead, those to other sites left out."""
    return [link for link in _LINK.findall(_prose(page)) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Return the names under which the headings of a page can be linked to."""
    return {_anchor(heading) for heading in _HEADING.findall(_prose(page))}


def sections(page: Path) -> set[str]:
    """Return the names of the sections of a page."""
    return {_anchor(heading) for heading in _SECTION.findall(_prose(page))}


def code_blocks(page: Path, section: str, language: str) -> list[str]:
    """Return the code in *language* in one section of a page."""
    text = page.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, f"there is no {language} in {section}"
    return blocks


def settings_listed(process: str) -> list[tuple[str, str]]:
    """Return name and default of every row in the table of settings that *process* heads."""
    listed = [(row[0].strip("`"), row[1].strip("`")) for row in rows(REFERENCE, "Settings", f"{process} |")]
    assert listed, f"there is no table of settings for {process}"
    return listed


def metrics_listed(process: str) -> dict[str, tuple[frozenset[str], bool]]:
    """Return every metric in the table that *process* heads: its labels, and whether it is a histogram."""
    found = [
        (name, frozenset(labels.split(",")) - {""}, row[1].startswith("histogram"))
        for row in rows(REFERENCE, "Metrics", f"{process} |")
        for name, labels in _METRIC.findall(row[0])
    ]
    listed = {name: (labels, is_histogram) for name, labels, is_histogram in found}
    assert listed, f"there is no table of metrics for {process}"
    assert len(listed) == len(found), f"a metric is listed twice for {process}"
    return listed


def commands_listed(page: Path, section: str) -> dict[str, set[str]]:
    """Return every command in the table of a section, with the options that the table shows."""
    choice = page.read_text().partition("\nCHOICE combines")[2].partition("\n\n")[0]
    listed: dict[str, set[str]] = {}
    command = ""
    for usages, _ in rows(page, section, "command"):
        for name, arguments in _USAGE.findall(usages.replace("CHOICE", choice.replace("`", ""))):
            command = name.strip() or command
            listed.setdefault(command, set()).update(re.findall("--[a-z-]+", arguments))
    return listed


def endpoints_listed() -> dict[str, tuple[set[str], set[str]]]:
    """Return every endpoint below /v1 in the table, with its query parameters and the scopes it names."""
    return {
        call.replace(":uuid", "{uuid}"): (set(re.findall(r"(\w+)=", query)), set(_SCOPE.findall(needs)))
        for cell, needs, _ in rows(API, "Endpoints", "| needs")
        for call, query in re.findall(r"`([A-Z]+ /v1/[^`?]+)\??([^`]*)`", cell)
    }


def rows(page: Path, section: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with *heading*, in one section of a page."""
    text = page.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    table = text.partition(f"\n| {heading}")[2].partition("\n\n")[0]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in cells]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def _prose(page: Path) -> str:
    return _CODE_BLOCK.sub("", page.read_text())
