"""The questionnaire: the questions of the calculation, read from a file."""

import hashlib
from collections.abc import Mapping
from importlib import resources
from typing import Annotated, Literal

import msgspec

ResponseType = Literal["text", "number", "select", "date", "radio_button", "currency"]


class ResponseOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An answer to choose: *name* is shown, *value* is submitted."""

    name: str
    value: str


OptionSet = Annotated[tuple[ResponseOption, ...], msgspec.Meta(min_length=1)]


class Question(msgspec.Struct, frozen=True, rename="camel"):
    """A question, shown only if each question in *conditions* was answered with the value given there."""

    ref: str
    question: str
    info: str
    response_type: ResponseType
    response_options: OptionSet | None
    conditions: dict[str, str] | None


class QuestionnaireStructure(msgspec.Struct, frozen=True):
    """The payload of the questionnaire endpoint: the questions in the order in which they are asked."""

    questionnaire: tuple[Question, ...]


class _WrittenQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question in the file, where *options* names a set that questions can share."""

    ref: str
    response_type: ResponseType
    question: str
    info: str
    options: str | None = None
    conditions: dict[str, str] | None = None


class _WrittenQuestionnaire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    options: dict[str, OptionSet]
    questions: tuple[_WrittenQuestion, ...]


def load() -> QuestionnaireStructure:
    """Read the questionnaire in the file beside this module."""
    return parse(resources.files("service.api").joinpath("questionnaire.toml").read_text(encoding="utf-8"))


def parse(toml: str) -> QuestionnaireStructure:
    """Read a questionnaire. Raises ValueError for a wrong type, name or field.

    That the questions can be asked from first to last is checked by a test, not at every start.
    """
    written = msgspec.toml.decode(toml, type=_WrittenQuestionnaire)
    return QuestionnaireStructure(tuple(_question(each, written.options) for each in written.questions))


def _question(written: _WrittenQuestion, option_sets: Mapping[str, OptionSet]) -> Question:
    if written.options is not None and written.options not in option_sets:
        raise ValueError(f"question {written.ref!r}: there are no options {written.options!r}")
    return Question(
        ref=written.ref,
        question=written.question,
        info=written.info.strip(),  # The closing quotes are on a line of their own.
        response_type=written.response_type,
        response_options=None if written.options is None else option_sets[written.options],
        conditions=written.conditions,
    )


def entity_tag(questionnaire: QuestionnaireStructure) -> str:
    """Return a weak ETag of the questions: the timestamp in the envelope differs each time."""
    return f'W/"{hashlib.sha256(msgspec.json.encode(questionnaire)).hexdigest()[:32]}"'
