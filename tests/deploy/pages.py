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


def prose(page: Path) -> str:
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the names under which the headings and the named rows of a page can be linked to."""
    return headings(page, levels="1,6") | {*re.findall(r'(?m)^\| <a id="(\w+)"></a>', prose(page))}


def headings(page: Path, levels: str) -> set[str]:
    found = re.findall(rf"(?m)^#{{{levels}}} (.+)$", prose(page))
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in found}


def section(page: Path, name: str) -> str:
    return page.read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def code_blocks(page: Path, name: str, language: str) -> list[str]:
    """Return the code in *language* in one section of a page."""
    blocks = re.findall(rf"(?ms)^ *```{language}\n(.*?)^ *```$", section(page, name))
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
    entries = re.findall(rf"(?ms)^### (\w+)\n\n- Means: {part}\n- Do: {part}\n- Call: {part}\n", text)
    entries += re.findall(rf'(?m)^\| <a id="\w+"></a>(\w+) \| {part} \| {part} \| {part} \|$', text)
    found = {name: do for name, _, do, _ in entries}
    assert len(found) == len(entries), "an alert has two entries"
    return found


def metrics_listed(process: str) -> dict[str, tuple[set[str], bool]]:
    """Return every metric in the table that *process* heads: its labels, and whether it is a histogram."""
    found = [
        (name, (set(labels.split(",")) - {""}, row[1].startswith("histogram")))
        for row in rows(REFERENCE, "Metrics", f"{process} |")
        for name, labels in re.findall(r"`([a-z_]+)(?:\{([a-z,]+)\})?`", row[0])
    ]
    assert len(dict(found)) == len(found), f"a metric is listed twice for {process}"
    return dict(found)
