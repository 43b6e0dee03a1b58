"""The questionnaire: the questions of the calculation as data, checked when they are loaded."""

import hashlib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Annotated, Literal

import msgspec

ResponseType = Literal["text", "number", "select", "date", "radio_button", "currency"]


class QuestionnaireError(ValueError):
    """The questionnaire is not written as it must be; the message names the question."""


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


class Questionnaire(msgspec.Struct, frozen=True):
    """The payload of the questionnaire endpoint: the questions in the order in which they are asked."""

    questionnaire: tuple[Question, ...]


class WrittenQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question as the TOML has it, where *options* names a set that questions can share."""

    ref: str
    response_type: ResponseType
    question: str
    info: str
    options: str | None = None
    conditions: dict[str, str] | None = None


class WrittenQuestionnaire(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The TOML file; its questions are read one by one, so that a bad one can be named."""

    options: dict[str, OptionSet]
    questions: tuple[dict[str, object], ...]


def entity_tag(questionnaire: Questionnaire) -> str:
    """Return a weak ETag of the questions: the envelope around them differs each time, in its timestamp."""
    return f'W/"{hashlib.sha256(msgspec.json.encode(questionnaire)).hexdigest()[:32]}"'


def load() -> Questionnaire:
    """Read the questionnaire that stands beside this module."""
    return parse(resources.files("service.api").joinpath("questionnaire.toml").read_text(encoding="utf-8"))


def parse(toml: str) -> Questionnaire:
    """Read a questionnaire and check that it can be asked from the first question to the last."""
    try:
        written = msgspec.toml.decode(toml, type=WrittenQuestionnaire)
    except msgspec.DecodeError as error:
        raise QuestionnaireError(str(error)) from error
    earlier: dict[str, Question] = {}
    for entry in written.questions:
        question = read_question(entry, written.options)
        if problems := ", ".join(find_problems(question, earlier)):
            raise QuestionnaireError(f"question {question.ref!r}: {problems}")
        earlier[question.ref] = question
    return Questionnaire(tuple(earlier.values()))


def read_question(entry: Mapping[str, object], option_sets: Mapping[str, OptionSet]) -> Question:
    """Read one question and put its options in the place of their set's name."""
    try:
        written = msgspec.convert(entry, WrittenQuestion)
    except msgspec.ValidationError as error:
        raise QuestionnaireError(f"question {entry.get('ref')!r}: {error}") from error
    if written.options is not None and written.options not in option_sets:
        raise QuestionnaireError(f"question {written.ref!r}: there are no options {written.options!r}")
    return Question(
        ref=written.ref,
        question=written.question,
        info=written.info.strip(),  # The closing quotes stand on a line of their own.
        response_type=written.response_type,
        response_options=None if written.options is None else option_sets[written.options],
        conditions=written.conditions,
    )


def find_problems(question: Question, earlier: Mapping[str, Question]) -> Iterator[str]:
    """Say everything that is wrong with *question*, which comes after the *earlier* ones."""
    options = question.response_options or ()
    values = [option.value for option in options]
    texts = [question.ref, question.question, question.info, *values, *(option.name for option in options)]
    if not all(text.strip() for text in texts):
        yield "a text is blank"
    if question.ref in earlier:
        yield "its ref is taken"
    if (question.response_type in {"select", "radio_button"}) != bool(options):
        yield f"{question.response_type} with{'' if options else 'out'} options"
    if len(set(values)) != len(values):
        yield "an option value comes twice"
    for ref, value in (question.conditions or {}).items():
        if ref not in earlier:
            yield f"it depends on {ref!r}, which is not an earlier question"
        elif value not in {option.value for option in earlier[ref].response_options or ()}:
            yield f"it depends on {ref!r} being {value!r}, which is not one of its options"
