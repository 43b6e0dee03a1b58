"""The page of the events, made from the AsyncAPI document: channels, messages, fields and examples.

AsyncAPI's own component is on npm alone, and shows the names of types.
"""

from collections.abc import Iterator
from html import escape
from typing import Any

import msgspec

from service.contracts import asyncapi
from service.contracts.layout import example, page, words

_DIRECTIONS = {
    "send": "This service publishes",
    "receive": "This service reads",
}


def render() -> str:
    """Return the page as HTML."""
    document = msgspec.to_builtins(asyncapi.document())
    paragraphs = document["info"]["description"].split("\n\n")
    about = "".join(f"<p>{words(paragraph)}</p>" for paragraph in paragraphs)
    channels = "".join(
        f"<h2>{heading}</h2>{_channels(document, action)}" for action, heading in _DIRECTIONS.items()
    )
    messages = "".join(_message(document, message) for message in document["components"]["messages"].values())
    return page("/schema/events", f"{about}{channels}<h2>Messages</h2>{messages}")


def _channels(document: dict[str, Any], action: str) -> str:
    """Return what the service sends or receives, and through which exchange or queue."""
    described = ""
    for operation in document["operations"].values():
        if operation["action"] == action:
            channel = _resolved(document, operation["channel"])
            names = [_resolved(document, _resolved(document, each))["name"] for each in operation["messages"]]
            links = ", ".join(f'<a href="#{escape(name)}">{escape(name)}</a>' for name in names)
            described += f"<dt>{_route(channel)}: {links}</dt><dd>{words(operation['summary'])}"
            described += f" {words(channel.get('description', ''))}</dd>"
    return f"<dl>{described}</dl>"


def _route(channel: dict[str, Any]) -> str:
    binding = channel["bindings"]["amqp"]
    if binding["is"] == "queue":
        return words(f"queue `{channel['address']}`")
    return words(f"exchange `{binding['exchange']['name']}`, routing key `{channel['address']}`")


def _message(document: dict[str, Any], message: dict[str, Any]) -> str:
    name = message["name"]
    return f"""\
<h3 id="{escape(name)}">{escape(name)}</h3>
<p>{words(message["summary"])} {words(f"Content type `{message['contentType']}`.")}</p>
<h4>Body</h4>
<dl>{_fields(document, message["payload"])}</dl>
{_headers(document, message)}
<h4>Example</h4>
{"".join(example(_formatted(each["payload"])) for each in message["examples"])}
"""


def _headers(document: dict[str, Any], message: dict[str, Any]) -> str:
    if "headers" not in message:
        return ""
    return f"<h4>Headers</h4><dl>{_fields(document, message['headers'])}</dl>"


def _fields(document: dict[str, Any], schema: dict[str, Any], path: str = "") -> str:
    """Return the fields of an object, and those of the objects in it."""
    shown = ""
    schema = _resolved(document, schema)
    for name, unresolved in schema["properties"].items():
        field = _resolved(document, unresolved)
        need = "" if name in schema["required"] else ", optional"
        shown += f"<dt><code>{escape(path + name)}</code> {words(_type(field))}{need}</dt>"
        if "description" in field:
            shown += f"<dd>{words(field['description'])}</dd>"
        if "properties" in field:
            shown += _fields(document, field, f"{path}{name}.")
    return shown


def _type(field: dict[str, Any]) -> str:
    """Return the type of a field, or its values, and its limits in words."""
    if "anyOf" in field:
        return " or ".join(_type(each) for each in field["anyOf"])
    if "const" in field:
        return f"always `{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    return ", ".join([field.get("format", field["type"]), *_limits(field)])


def _limits(field: dict[str, Any]) -> Iterator[str]:
    if "minimum" in field:
        yield f"at least {field['minimum']}"
    if "maxLength" in field:
        yield f"at most {field['maxLength']} characters"


def _resolved(document: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return what a reference refers to; anything else as it is."""
    if "$ref" not in part:
        return part
    target: dict[str, Any] = document
    for step in part["$ref"].removeprefix("#/").split("/"):
        target = target[step]
    return target


def _formatted(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value)).decode()
