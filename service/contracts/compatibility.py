"""Whether a change of the AsyncAPI document breaks those who built on the one before.

What we send must be readable to who knows the old document; what the old one let others send must be readable
to us. Both are one question: is everything that a sender may write something that the reader takes? And in
both directions no field may go away: what one side relied on would be lost in silence.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_LOWER_BOUNDS = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_COMPARED = {
    "anyOf", "type", "const", "enum", "properties", "required", "items", *_LOWER_BOUNDS, *_UPPER_BOUNDS
}  # fmt: skip
_EXPLANATIONS = {"title", "description", "default", "examples", "deprecated", "$comment"}
_TYPES_OF_VALUES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def breaks(old: Schema, new: Schema) -> list[str]:
    """Return a line for everything in the document *new* that breaks who built on *old*."""
    return [*_channel_breaks(old, new), *_operation_breaks(old, new)]


def _channel_breaks(old: Schema, new: Schema) -> Iterator[str]:
    for name, channel in old["channels"].items():
        now = new["channels"].get(name)
        if now is None:
            yield f"channel {name}: removed"
        else:
            for fact in ("address", "bindings"):
                if now[fact] != channel[fact]:
                    yield f"channel {name}: other {fact}"


def _operation_breaks(old: Schema, new: Schema) -> Iterator[str]:
    for name, operation in old["operations"].items():
        now = new["operations"].get(name)
        if now is None or any(now[fact] != operation[fact] for fact in ("action", "channel")):
            yield f"{name}: removed, or turned into another operation"
            continue
        is_sent = operation["action"] == "send"
        before, after = _messages(old, operation), _messages(new, now)
        for message in before.keys() - after.keys():
            yield f"{name}: {message} removed"
        for message in after.keys() - before.keys() if is_sent else ():
            yield f"{name}: {message} is new to who reads this channel"
        for message in before.keys() & after.keys():
            sent, read = (after, before) if is_sent else (before, after)
            yield from unreadable(sent[message], read[message], at=f"{name}: {message}")
            for field in _fields(before[message]) - _fields(after[message]):
                yield f"{name}: {message}{field}: removed"


def _messages(document: Schema, operation: Schema) -> dict[str, Schema]:
    """Return what an operation carries, by name: a schema of each whole message, without references."""
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
    match part:
        case {"$ref": str(reference)}:
            target = document
            for step in reference.removeprefix("#/").split("/"):
                target = target[step]
            return _inlined(document, {**target, **{key: part[key] for key in part if key != "$ref"}})
        case dict():
            return {key: _inlined(document, value) for key, value in part.items()}
        case list():
            return [_inlined(document, value) for value in part]
    return part


def unreadable(sent: Schema, read: Schema, *, at: str) -> Iterator[str]:
    """Yield a line for everything that *sent* allows and *read* does not; where in doubt, also a line."""
    for alternative in _alternatives(sent):
        refusals = [list(_refusals(alternative, choice, at)) for choice in _alternatives(read)]
        if all(refusals):
            yield from min(refusals, key=len)


def _alternatives(schema: Schema) -> list[Schema]:
    shared = {key: value for key, value in schema.items() if key != "anyOf"}
    return [{**shared, **choice} for choice in schema.get("anyOf", [{}])]


def _refusals(sent: Schema, read: Schema, at: str) -> Iterator[str]:
    yield from _refused_values(sent, read, at)
    for bound in _LOWER_BOUNDS:
        if bound in read and sent.get(bound, float("-inf")) < read[bound]:
            yield f"{at}: {bound} {read[bound]} not kept"
    for bound in _UPPER_BOUNDS:
        if bound in read and sent.get(bound, float("inf")) > read[bound]:
            yield f"{at}: {bound} {read[bound]} not kept"
    for keyword in read.keys() - _COMPARED - _EXPLANATIONS:  # such as pattern and format
        if sent.get(keyword) != read[keyword]:
            yield f"{at}: {keyword} {read[keyword]!r} not kept"
    if "items" in read:
        yield from unreadable(sent.get("items", {}), read["items"], at=f"{at}[]")
    yield from _refused_fields(sent, read, at)


def _refused_values(sent: Schema, read: Schema, at: str) -> Iterator[str]:
    values, readable = _values(sent), _values(read)
    if readable is not None:
        added = ["any"] if values is None else [value for value in values if value not in readable]
        if added:
            yield f"{at}: other values than {readable}: {added}"
    elif "type" in read:
        readable_types = _types(read) | ({"integer"} if "number" in _types(read) else set())
        added = sorted(_types(sent) - readable_types)
        if added:
            yield f"{at}: {' or '.join(added)} in place of {read['type']}"


def _values(schema: Schema) -> list[Any] | None:
    """Return all values that a schema allows, or None when it does not list them."""
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
            yield f"{at}.{name}: not known"
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
