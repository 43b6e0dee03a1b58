"""Reads the body of an HTTP request: strictly, and with every failing field reported at once.

Litestar converts bodies with `strict=False`, and stops at the first failing field. So a handler that takes a
body names `StrictBody` as its `dto`. A body's struct is all that `parse` needs to know.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from http import HTTPStatus
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import msgspec
from litestar import MediaType
from litestar.dto import MsgspecDTO
from litestar.openapi.spec import Reference, Schema
from litestar.typing import FieldDefinition

from service import json_faults, text_rules
from service.api.envelope import ErrorCode, FieldError
from service.api.errors import ApiError, Failure, InvalidSubmission
from service.server.limits import LARGEST_BODY

UNKNOWN_FIELDS_NAMED = 50  # Naming thousands would take longer than storing a request.


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an HTTP request. The annotations of its fields say what is valid."""

    @classmethod
    def late_errors(cls, _values: Mapping[str, Any]) -> list[FieldError]:
        """Return errors that count only under a condition that the handler checks, or beside other errors."""
        return []


AnyBody = TypeVar("AnyBody", bound=Body)


class CheckedBy(NamedTuple):
    """The part of an Annotated type that checks what msgspec cannot."""

    run: Callable[[Any], Failure | None]


class StrictBody(MsgspecDTO[AnyBody], Generic[AnyBody]):
    """Decodes a body by `parse`."""

    def decode_bytes(self, value: bytes) -> AnyBody:
        """Return the body. Raises ApiError, or InvalidSubmission with every failing field."""
        return parse(self.model_type, value)

    @classmethod
    def create_openapi_schema(
        cls,
        field_definition: FieldDefinition,  # noqa: ARG003
        handler_id: str,  # noqa: ARG003
        schema_creator: Any,  # noqa: ANN401 - Litestar does not export its type
    ) -> Reference | Schema:
        """Return the schema of the body's own type. By default, it is that of a type made for the handler."""
        schema: Reference | Schema = schema_creator.for_field_definition(
            FieldDefinition.from_annotation(cls.model_type)
        )
        return schema


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Read a body. Raises ApiError if it is not JSON, and InvalidSubmission with all failing fields."""
    try:
        parsed, errors = _read(kind, body)
    except json_faults.UNREADABLE as error:
        raise malformed_body(json_faults.why_unreadable(body, error)) from None
    if parsed is None:
        order = [*_fields(kind), *(error.field for error in errors)]  # unknown fields last
        raise InvalidSubmission(sorted(errors, key=lambda error: order.index(error.field)))
    return parsed


def _read(kind: type[AnyBody], body: bytes) -> tuple[AnyBody | None, list[FieldError]]:
    body.decode()  # msgspec does not check the encoding inside a Raw.
    errors: list[FieldError] = []
    parsed: AnyBody | None = None
    try:
        parsed = _decoder(kind).decode(body)
        values = msgspec.structs.asdict(parsed)
    except msgspec.ValidationError:
        values, errors = _read_field_by_field(kind, msgspec.json.decode(body))
    for name, check in _checks(kind).items():
        value = values.get(name)
        if value is not None and (failure := check(value)):
            errors.append(field_error(name, *failure))
    late_errors = kind.late_errors(values)
    if errors:
        return None, errors + late_errors
    return parsed or kind(**values), errors


def _read_field_by_field(kind: type[Body], body: Any) -> tuple[dict[str, Any], list[FieldError]]:  # noqa: ANN401
    """Return the fields of valid types, and an error for each field that is invalid, missing or unknown."""
    if not isinstance(body, dict):
        raise InvalidSubmission([FieldError("invalid_type", "The body must be a JSON object.", None, "")])
    values: dict[str, Any] = {}
    errors = []
    fields = _fields(kind)
    for name, field in fields.items():
        if name not in body:
            if field.required:
                errors.append(field_error(name, "required", "This field is required."))
            continue
        try:
            values[name] = _convert(body[name], field.type)
        except msgspec.ValidationError as error:
            errors.append(field_error(name, *_classify(str(error), body[name])))
    unknown = islice((name for name in body if name not in fields), UNKNOWN_FIELDS_NAMED)
    errors += [
        field_error(name[: text_rules.CHARACTERS], "unknown_field", "There is no such field: check its name.")
        for name in unknown
    ]
    return values, errors


def _convert(value: Any, kind: Any) -> Any:  # noqa: ANN401 - any JSON value, and any type
    if msgspec.Raw in _parts(kind):
        return msgspec.Raw(msgspec.json.encode(value))
    return msgspec.convert(_integral(value), kind)


def _integral(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return 300000.0 as 300000, because both are integers in JSON Schema, and so in the OpenAPI document.

    Not applied inside meta_data, where 3.0 stays 3.0.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def field_error(name: str, code: ErrorCode, message: str) -> FieldError:
    """Return an error of one field of a body."""
    escaped = name.replace("~", "~0").replace("/", "~1")
    return FieldError(code, message, name, f"/{escaped}")


def _classify(problem: str, value: Any) -> Failure:  # noqa: ANN401 - any JSON value
    """Return the error code and message for a problem that msgspec reports about one value."""
    if problem.startswith("Expected `str` of length <= "):
        return too_long(int(problem.rpartition(" ")[2]), value)
    if problem.startswith(("Expected `int` <=", "Expected `int` >=")):
        return "out_of_range", f"Expected an integer {problem.removeprefix('Expected `int` ')}."
    if problem.startswith("Invalid enum value"):
        return "invalid_choice", "Expected SDLT_CALCULATION."
    expected, _, got = json_faults.in_json_words(problem).removeprefix("Expected ").partition(", got ")
    return "invalid_type", f"Expected {expected}, got {got}."


def too_long(longest: int, value: str) -> Failure:
    """Return the failure of a text that is too long."""
    return "too_long", f"Expected at most {longest} characters, got {len(value)}."


@cache
def _decoder(kind: type[AnyBody]) -> msgspec.json.Decoder[AnyBody]:
    return msgspec.json.Decoder(kind)


@cache
def _fields(kind: type[Body]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(kind)}


@cache
def _checks(kind: type[Body]) -> dict[str, Callable[[Any], Failure | None]]:
    return {
        name: part.run
        for name, field in _fields(kind).items()
        for part in _parts(field.type)
        if isinstance(part, CheckedBy)
    }


def _parts(annotation: object) -> Iterator[object]:
    """Yield the parts of a type, such as annotations and the types of a union, and the parts of each part."""
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def check_declared(content_type: str | None, encoding: str | None) -> None:
    """Raise ApiError unless a body is declared as uncompressed JSON."""
    if not content_type:
        raise _unsupported("The Content-Type header is missing: send `Content-Type: application/json`.")
    if content_type.partition(";")[0].strip().lower() != MediaType.JSON:
        raise _unsupported(
            "The Content-Type header names another type than JSON: send `Content-Type: application/json`."
        )
    if encoding is not None and encoding.lower() != "identity":
        raise _unsupported(
            "The Content-Encoding header declares compression: send uncompressed JSON without this header."
        )


def _unsupported(message: str) -> ApiError:
    return ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message)


def malformed_body(reason: str) -> ApiError:
    """Return the error for a body that is not JSON."""
    return ApiError(HTTPStatus.BAD_REQUEST, "malformed_body", f"The body is not readable JSON: {reason}.")


def body_overdue() -> ApiError:
    """Return the error for an overdue body. The body may still come, so the connection is closed."""
    return ApiError(
        HTTPStatus.REQUEST_TIMEOUT,
        "request_timeout",
        "The body did not arrive in time: send the request again.",
        (b"connection", b"close"),
    )


def body_too_large(size: int | None) -> ApiError:
    """Return the error for a body that is too large. *size* is None if the caller did not declare it.

    The rest of the body is not read, so the connection is closed.
    """
    most = f"{LARGEST_BODY // 1024} KiB"
    return ApiError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body_too_large",
        f"The body is larger than {most}: send less."
        if size is None
        else f"The body has {size} bytes: at most {LARGEST_BODY} ({most}) are accepted.",
        (b"connection", b"close"),
    )
