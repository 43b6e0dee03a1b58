"""Finds changes of the AsyncAPI document that break consumers or senders built on the committed one.

Everything that a sender may write must be acceptable to its reader: what we send, to consumers that know the
old document; and what others send by the old document, to us. So making a field optional is safe in messages
that we receive, and breaking in messages that we send. In both directions no field may disappear, because
the other side would lose it silently. A change that cannot be judged, such as another pattern, is breaking.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_COMPARED = {
    "anyOf", "type", "const", "enum", "properties", "required", "items", *_LOWER_BOUNDS, *_UPPER_BOUNDS
}  # fmt: skip
_ANNOTATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def breaks(old: Schema, new: Schema) -> list[str]:
    """Return a line for each change from *old* to *new* that breaks consumers or senders built on *old*."""
    return [*_channel_breaks(old, new), *_operation_breaks(old, new)]


def _channel_breaks(old: Schema, new: Schema) -> Iterator[str]:
    for name, channel in old["channels"].items():
        now = new["channels"].get(name)
        if now is None:
            yield f"channel {name}: removed"
        else:
            for fact in ("address", "bindings"):
                if now[fact] != channel[fact]:
                    yield f"channel {name}: {fact} changed"


def _operation_breaks(old: Schema, new: Schema) -> Iterator[str]:
    for name, operation in old["operations"].items():
        now = new["operations"].get(name)
        if now is None or any(now[fact] != operation[fact] for fact in ("action", "channel")):
            yield f"{name}: removed, or moved to another action or channel"
            continue
        is_sent = operation["action"] == "send"
        before, after = _messages(old, operation), _messages(new, now)
        for message in before.keys() - after.keys():
            yield f"{name}: {message} removed"
        for message in after.keys() - before.keys() if is_sent else ():
            yield f"{name}: {message} added, which existing readers of this channel do not know"
        for message in before.keys() & after.keys():
            sent, read = (after, before) if is_sent else (before, after)
            yield from unreadable(sent[message], read[message], at=f"{name}: {message}")
            for field in _fields(before[message]) - _fields(after[message]):
                yield f"{name}: {message}{field}: removed"


def _messages(document: Schema, operation: Schema) -> dict[str, Schema]:
    """Return a schema of each message of an operation, by name: content type, headers and payload."""
    names = [reference["$ref"].rpartition("/")[2] for reference in operation["messages"]]
    return {name: _whole(document, document["components"]["messages"][name]) for name in names}


def _whole(document: Schema, message: Schema) -> Schema:
    parts = {
        "contentType": {"const": message["contentType"]},
        "headers": message.get("headers", {}),
        "payload": message["payload"],
    }
    whole: Schema = _inlined(document, {"properties": parts, "required": list(parts)})
    return whole


def _inlined(document: Schema, part: Any) -> Any:  # noqa: ANN401 - any JSON
    """Return a part of the document with every reference replaced by its target."""
    match part:
        case {"$ref": str(reference)}:
            target = document
            for step in reference.removeprefix("#/").split("/"):
                target = target[step]
            return _inlined(document, {**target, **{name: part[name] for name in part if name != "$ref"}})
        case dict():
            return {name: _inlined(document, value) for name, value in part.items()}
        case list():
            return [_inlined(document, value) for value in part]
    return part


def unreadable(sent: Schema, read: Schema, *, at: str) -> Iterator[str]:
    """Yield a line for everything that *sent* allows and *read* does not, and for what cannot be judged."""
    for alternative in _alternatives(sent):
        refusals = [list(_refusals(alternative, choice, at)) for choice in _alternatives(read)]
        if all(refusals):
            yield from min(refusals, key=len)


def _alternatives(schema: Schema) -> list[Schema]:
    shared = {keyword: value for keyword, value in schema.items() if keyword != "anyOf"}
    return [{**shared, **choice} for choice in schema.get("anyOf", [{}])]


def _refusals(sent: Schema, read: Schema, at: str) -> Iterator[str]:
    yield from _refused_values(sent, read, at)
    for bound in _LOWER_BOUNDS:
        if bound in read and sent.get(bound, float("-inf")) < read[bound]:
            yield f"{at}: may violate {bound} {read[bound]}"
    for bound in _UPPER_BOUNDS:
        if bound in read and sent.get(bound, float("inf")) > read[bound]:
            yield f"{at}: may violate {bound} {read[bound]}"
    for keyword in read.keys() - _COMPARED - _ANNOTATIONS:  # such as pattern and format
        if sent.get(keyword) != read[keyword]:
            yield f"{at}: may violate {keyword} {read[keyword]!r}"
    if "items" in read:
        yield from unreadable(sent.get("items", {}), read["items"], at=f"{at}[]")
    yield from _refused_fields(sent, read, at)


def _refused_values(sent: Schema, read: Schema, at: str) -> Iterator[str]:
    values, readable = _values(sent), _values(read)
    if readable is not None:
        added = ["any"] if values is None else [value for value in values if value not in readable]
        if added:
            yield f"{at}: may be {added}, not only {readable}"
    elif "type" in read:
        readable_types = _types(read) | ({"integer"} if "number" in _types(read) else set())
        added = sorted(_types(sent) - readable_types)
        if added:
            yield f"{at}: {' or '.join(added)} instead of {read['type']}"


def _values(schema: Schema) -> list[Any] | None:
    """Return the values that a schema allows, or None if it does not list them."""
    return [schema["const"]] if "const" in schema else schema.get("enum")


def _types(schema: Schema) -> set[str]:
    """Return the types that a schema allows."""
    values = _values(schema)
    named = schema.get("type", ["any type"])
    types = {named} if isinstance(named, str) else set(named)
    if values is not None:
        types = {_TYPES_OF_VALUES.get(type(value), "any type") for value in values}
    return types


def _refused_fields(sent: Schema, read: Schema, at: str) -> Iterator[str]:
    written, known = sent.get("properties", {}), read.get("properties", {})
    always = sent.get("required", ())
    for name in read.get("required", ()):
        if name not in always:
            yield f"{at}.{name}: may be missing"
    if read.get("additionalProperties") is False:
        for name in written.keys() - known.keys():
            yield f"{at}.{name}: unknown to the reader"
    for name in written.keys() & known.keys():
        yield from unreadable(written[name], known[name], at=f"{at}.{name}")


def _fields(schema: Schema) -> set[str]:
    """Return the path of every field that a schema names."""
    found = set()
    for name, field in schema.get("properties", {}).items():
        found |= {f".{name}", *(f".{name}{below}" for below in _fields(field))}
    if "items" in schema:
        found |= {f"[]{below}" for below in _fields(schema["items"])}
    for choice in schema.get("anyOf", ()):
        found |= _fields(choice)
    return found
