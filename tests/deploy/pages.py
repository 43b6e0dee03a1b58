"""What the pages hold: their sections, the code in them, and their tables."""

import re
from pathlib import Path
from textwrap import dedent

from deploy.local.machine.folders import CHECKOUT

README = CHECKOUT / "README.md"
API = CHECKOUT / "service" / "README.md"
WORKER = CHECKOUT / "worker" / "README.md"
INSTALLATION = CHECKOUT / "deploy" / "README.md"
OPERATING = CHECKOUT / "deploy" / "operate.md"
RUNBOOK = CHECKOUT / "deploy" / "runbook.md"
REFERENCE = CHECKOUT / "deploy" / "reference.md"

_CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_METRIC = re.compile(r"`([a-z_]+)(?:\{([a-z,]+)\})?`")


def prose(page: Path) -> str:
    return _CODE_BLOCK.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the names under which the headings and the named rows of a page can be linked to."""
    return _of_headings(page, levels="1,6") | set(
        re.findall(r'^\| <a id="(\w+)"></a>', prose(page), re.MULTILINE)
    )


def sections(page: Path) -> set[str]:
    return _of_headings(page, levels="2")


def _of_headings(page: Path, levels: str) -> set[str]:
    headings = re.findall(rf"^#{{{levels}}} (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def section(page: Path, name: str) -> str:
    return page.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def code_blocks(page: Path, name: str, language: str) -> list[str]:
    """Return the code in *language* in one section of a page."""
    blocks = re.findall(rf"^ *```{language}\n(.*?)^ *```$", section(page, name), re.MULTILINE | re.DOTALL)
    assert blocks, f"there is no {language} in {name}"
    return [dedent(block) for block in blocks]


def rows(page: Path, name: str, heading: str) -> list[list[str]]:
    """Return the cells of the table whose header begins with *heading*, in one section of a page."""
    table = section(page, name).partition(f"\n| {heading}")[2].partition("\n\n")[0]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()[2:]]
    assert cells, f"there is no table of {heading} in {name}"
    return [[cell.strip() for cell in row] for row in cells]


def alert_entries() -> dict[str, str]:
    """Return what the runbook says to do at each alert, of every entry that also has the other parts."""
    text = section(RUNBOOK, "Alerts")
    part = r"(\S.*?)"
    entries = re.findall(
        rf"^### (\w+)\n\n- Means: {part}\n- Do: {part}\n- Call: {part}\n", text, re.MULTILINE | re.DOTALL
    )
    entries += re.findall(rf'^\| <a id="\w+"></a>(\w+) \| {part} \| {part} \| {part} \|$', text, re.MULTILINE)
    found = {name: do for name, _, do, _ in entries}
    assert len(found) == len(entries), "an alert has two entries"
    return found


def metrics_listed(process: str) -> dict[str, tuple[set[str], bool]]:
    """Return every metric in the table that *process* heads: its labels, and whether it is a histogram."""
    found = [
        (name, (set(labels.split(",")) - {""}, row[1].startswith("histogram")))
        for row in rows(REFERENCE, "Metrics", f"{process} |")
        for name, labels in _METRIC.findall(row[0])
    ]
    assert len(dict(found)) == len(found), f"a metric is listed twice for {process}"
    return dict(found)
