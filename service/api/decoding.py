"""Decodes bodies and queries into structs: strictly, and with every failing field reported at once.

Litestar converts with `strict=False`, and stops at the first failing field. A handler gets its `data`
decoded here by its `dto`. All that is needed of a struct are the annotations of its fields.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain, islice
from types import FunctionType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin
from urllib.parse import parse_qsl

import msgspec
from litestar import Request
from litestar.di import Provide
from litestar.dto import MsgspecDTO
from litestar.openapi.spec import Schema
from msgspec.structs import replace

from service import json_faults, text_rules
from service.api.api_request import malformed_body
from service.api.envelope import FieldError
from service.api.errors import Failure, InvalidSubmission

UNKNOWN_FIELDS_NAMED = 50  # Naming thousands would take longer than storing a request.


class Sent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a body, or the parameters of a query. Their annotations say what is valid.

    A function in an Annotated type checks what msgspec cannot. It gets no null.
    """

    @classmethod
    def joint_errors(cls, _sent: Mapping[str, Any], *, others: bool) -> list[FieldError]:  # noqa: ARG003
        """Return the errors that depend on several fields. *others* is whether there are other errors.

        A value that is invalid by itself is in *sent* as it was sent.
        """
        return []


Kind = TypeVar("Kind", bound=Sent)


class BodyDecoder(MsgspecDTO[Kind]):
    """Decodes a body by `parse`."""

    def decode_bytes(self, value: bytes) -> Kind:
        """Return the body. Raises ApiError, or InvalidSubmission with every failing field."""
        return parse(self.model_type, value)

    @classmethod
    def create_openapi_schema(cls, *_: object, **__: object) -> Schema:
        """Return nothing. openapi/documenting.py takes the schema that msgspec makes."""
        return Schema()


def parse(kind: type[Kind], body: bytes) -> Kind:
    """Read a body. Raises ApiError if it is not JSON, and InvalidSubmission with all failing fields."""
    try:
        return _read(kind, body)
    except json_faults.UNREADABLE as error:
        raise malformed_body(json_faults.why_unreadable(body, error)) from None


def _read(kind: type[Kind], body: bytes) -> Kind:
    text = body.decode()  # msgspec does not check the encoding inside a Raw.
    try:
        parsed = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        sent = msgspec.json.decode(body)
        json_faults.check_names(text)  # The last of several members may be valid.
        if not isinstance(sent, dict):
            message = "The body must be a JSON object."
            raise InvalidSubmission([FieldError("invalid_type", message, None, "")]) from None
        return kind(**_convert_fields(kind, sent, {}))
    try:
        json_faults.check_names(text)
        _check(kind, msgspec.structs.asdict(parsed), {})
    except json_faults.UNREADABLE:
        msgspec.json.decode(body)  # Usually raises an error that has the position of the fault in the body.
        raise
    return parsed


def provide_query(kind: type[Kind]) -> Provide:
    """Return the dependency of a handler that takes a query.

    Litestar itself would pass unknown parameters, take the last of several, and stop at the first failure.
    """

    def provide(request: Request[Any, Any, Any]) -> Kind:
        return parse_query(kind, request.scope["query_string"])

    return Provide(provide, sync_to_thread=False)


def parse_query(kind: type[Kind], query_string: bytes) -> Kind:
    """Read a query. Raises InvalidSubmission with all failing parameters.

    Only as many parameters are read as can be reported, because a query may have thousands.
    """
    parts = [part for part in query_string.decode("latin-1").split("&") if part]
    most = len(kind.__struct_fields__) + UNKNOWN_FIELDS_NAMED
    query = parse_qsl("&".join(parts[:most]), keep_blank_values=True)
    times = Counter(name for name, _ in query)
    errors = {name: field_error(_REPEATED, name) for name in kind.__struct_fields__ if times[name] > 1}
    try:
        return kind(**_convert_fields(kind, dict(query), errors, in_query=True))
    except InvalidSubmission as refused:
        # A pointer leads into a body. And all that is sent in a query is a string.
        shown = [
            replace(error, pointer=None, message=error.message.replace(", got a string.", "."))
            for error in refused.errors
        ]
        raise InvalidSubmission(shown) from None


_REPEATED: Failure = ("repeated", "This parameter was sent more than once: send it once.")


def _convert_fields(
    kind: type[Sent], sent: Mapping[str, Any], errors: dict[str, FieldError], *, in_query: bool = False
) -> dict[str, Any]:
    """Return the values of the fields *sent*. Raises InvalidSubmission with *errors* and those found."""
    values = dict(sent)
    fields = _fields(kind)
    for name in fields.keys() - errors.keys():
        if name in sent:
            try:
                values[name] = _convert(sent[name], fields[name].type, strict=not in_query)
            except msgspec.ValidationError as error:
                errors[name] = _classify(name, error, sent[name], fields[name].type)
        elif fields[name].required:
            errors[name] = field_error(_REQUIRED, name)
    for name in islice((name for name in sent if name not in fields), UNKNOWN_FIELDS_NAMED):
        called = "parameter" if in_query else "field"
        errors[name] = field_error(("unknown_field", f"There is no such {called}: check its name."), name)
    _check(kind, values, errors)
    return values


def _check(kind: type[Sent], values: Mapping[str, Any], errors: dict[str, FieldError]) -> None:
    """Raise InvalidSubmission if there are *errors*, or checks of the values find others."""
    for name, check in _checks(kind).items():
        value = values.get(name)
        if value is not None and value is not msgspec.UNSET and name not in errors:
            failure = check(value)
            if failure:
                errors[name] = field_error(failure, name)
    for error in kind.joint_errors(values, others=bool(errors)):
        errors.setdefault(str(error.field), error)
    if errors:  # in the order of the fields, unknown ones last
        ordered = dict.fromkeys(_fields(kind)) | errors
        raise InvalidSubmission([error for error in ordered.values() if error])


def _convert(value: Any, kind: Any, *, strict: bool) -> Any:  # noqa: ANN401 - any JSON value, and any type
    if msgspec.Raw in _parts(kind):
        return msgspec.Raw(msgspec.json.encode(value))
    if isinstance(value, float) and value.is_integer():
        # 300000.0 is an integer in JSON Schema, and so in the document. Inside meta_data, 3.0 stays 3.0.
        value = int(value)
    return msgspec.convert(value, kind, strict=strict)


def field_error(failure: Failure, name: str) -> FieldError:
    """Return an error of the field with this name."""
    shown = name[: text_rules.CHARACTERS]
    return FieldError(*failure, shown, "/" + shown.replace("~", "~0").replace("/", "~1"))


_REQUIRED: Failure = ("required", "This field is required.")


def _classify(name: str, error: msgspec.ValidationError, value: Any, kind: Any) -> FieldError:  # noqa: ANN401
    """Return the error for what msgspec reports about a field's value."""
    problem = json_faults.describe(error)
    if length := re.fullmatch("Expected a string of length <= ([0-9]+)", problem):
        return field_error(too_long(int(length[1]), value), name)
    if problem == json_faults.NOT_ALLOWED:
        choices = [get_args(part) for part in _parts(kind) if get_origin(part) is Literal]
        expected = " or ".join(map(str, chain(*choices))) or "another value"
        return field_error(("invalid_choice", f"Expected {expected}."), name)
    is_type = ", got " in problem or problem.startswith("Invalid")
    return field_error(("invalid_type" if is_type else "out_of_range", f"{problem}."), name)


def too_long(longest: int, value: str) -> Failure:
    """Return the failure of a text that is too long."""
    return "too_long", f"Expected at most {longest} characters, got {len(value)}."


@cache
def _fields(kind: type[Sent]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(kind)}


@cache
def _checks(kind: type[Sent]) -> dict[str, Callable[[Any], Failure | None]]:
    return {
        name: part
        for name, field in _fields(kind).items()
        for part in _parts(field.type)
        if isinstance(part, FunctionType)
    }


def _parts(annotation: object) -> Iterator[object]:
    """Yield a type and, of an annotated one or a union, the parts."""
    yield annotation
    if get_origin(annotation) in {Annotated, Union, UnionType}:
        for part in get_args(annotation):
            yield from _parts(part)
