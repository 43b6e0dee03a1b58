"""What the pages have in common, as HTML."""

import re
from html import escape

from service.contracts import assets

TITLE = "Calculation requests"
_LINKS = {
    "/schema": "HTTP API",
    "/schema/events": "Events",
    "/schema/openapi.json": "OpenAPI document",
    "/schema/asyncapi.json": "AsyncAPI document",
}
_CURRENT = ' aria-current="page"'


def page(path: str, content: str, *, head: str = "", after: str = "") -> str:
    """Return the page at *path*, which is one of the links. All arguments are HTML."""
    links = "\n".join(
        f'<a href="{to}"{_CURRENT if to == path else ""}>{name}</a>' for to, name in _LINKS.items()
    )
    return f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{TITLE}: {_LINKS[path]}</title>
<link rel="icon" href="{assets.url("favicon-32x32.png")}">
{head}<link rel="stylesheet" href="{assets.url("page.css")}">
</head>
<body>
<main>
<h1>{TITLE}</h1>
<nav>
{links}
</nav>
{content}
</main>
{after}</body>
</html>
"""


def words(text: str) -> str:
    """Return *text*, which has names in backticks, as HTML."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def example(text: str) -> str:
    """Return a block of code."""
    return f"<pre>{escape(text)}</pre>"
