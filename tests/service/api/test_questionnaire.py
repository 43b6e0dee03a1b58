"""The questionnaire: its file against the table of the interface, its loader, its ETag."""

from collections.abc import Iterator, Mapping

import httpx
import msgspec
import pytest

from service.api.questionnaire import Question, QuestionnaireStructure, entity_tag, load, parse

STRUCTURE = "/v1/questionnaire/structure"
YES_NO = ["YES", "NO"]
USES = ["RESIDENTIAL", "MIXED", "COMMERCIAL", "DEVELOPMENT"]
BUYER_TYPES = [
    "INDIVIDUAL",
    "COUPLE",
    "LIMITED_COMPANY",
    "CHARITY",
    "PENSION",
    "TRUST",
    "COUNCIL",
    "PARTNERSHIP",
]

# interface.md, "The questions, in the order returned": ref, responseType, option values, conditions.
INTERFACE = [
    ("case_ref", "text", None, None),
    ("country", "radio_button", ["ENGLAND", "WALES", "SCOTLAND"], None),
    ("is_leasehold", "radio_button", YES_NO, None),
    ("lease_nature", "radio_button", ["NEW", "EXTENSION", "TAKEOVER"], {"is_leasehold": "YES"}),
    ("lease_type", "radio_button", ["RENT", "PREMIUM"], {"is_leasehold": "YES"}),
    ("lease_premium", "currency", None, {"is_leasehold": "YES", "lease_type": "PREMIUM"}),
    ("lease_term", "number", None, {"is_leasehold": "YES", "lease_type": "RENT"}),
    ("lease_rent_year_1", "currency", None, {"is_leasehold": "YES", "lease_type": "RENT"}),
    ("property_value", "currency", None, {"is_leasehold": "NO"}),
    ("completion_date", "date", None, None),
    ("is_refinance", "radio_button", YES_NO, {"is_leasehold": "NO"}),
    ("buyer_type", "select", BUYER_TYPES, None),
    ("ftb_relief", "radio_button", YES_NO, None),
    ("owns_other", "radio_button", YES_NO, None),
    ("selling_main_residence", "radio_button", YES_NO, {"owns_other": "YES"}),
    (
        "all_purchasers_on_title",
        "radio_button",
        YES_NO,
        {"owns_other": "YES", "selling_main_residence": "YES"},
    ),
    ("replacing_pr", "radio_button", YES_NO, None),
    ("uk_resident", "radio_button", YES_NO, None),
    ("current_use", "radio_button", USES, None),
    ("intended_use", "radio_button", USES, None),
    ("is_dwelling", "radio_button", YES_NO, None),
    ("being_converted", "radio_button", YES_NO, {"is_dwelling": "NO"}),
    ("is_development", "radio_button", YES_NO, {"being_converted": "NO"}),
    ("is_purchase", "radio_button", YES_NO, None),
    ("has_annexes", "radio_button", YES_NO, None),
    ("num_dwellings", "number", None, None),
    ("has_grounds", "radio_button", YES_NO, None),
]

WELL_WRITTEN = """
[options]
yes_no = [{ value = "YES", name = "Yes" }, { value = "NO", name = "No" }]

[[questions]]
ref = "let"
response_type = "radio_button"
options = "yes_no"
question = "Is it let?"
info = "To tenants."

[[questions]]
ref = "rent"
response_type = "currency"
conditions = { let = "YES" }
question = "What is the rent?"
info = "Per year."
"""


def problems_in(questionnaire: QuestionnaireStructure) -> list[str]:
    """Return why a questionnaire cannot be asked from the first question to the last."""
    problems = []
    earlier: dict[str, Question] = {}
    for question in questionnaire.questionnaire:
        problems += [f"question {question.ref!r}: {problem}" for problem in problems_of(question, earlier)]
        earlier[question.ref] = question
    return problems


def problems_of(question: Question, earlier: Mapping[str, Question]) -> Iterator[str]:
    """Yield what is wrong with a question that comes after the *earlier* ones."""
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


def test_questions_can_be_asked_from_the_first_to_the_last() -> None:
    assert problems_in(load()) == []


def test_questions_are_those_of_the_interface_in_its_order() -> None:
    table = [
        (
            question.ref,
            question.response_type,
            question.response_options and [option.value for option in question.response_options],
            question.conditions,
        )
        for question in load().questionnaire
    ]

    assert table == INTERFACE


def test_no_text_is_empty_or_has_surrounding_space() -> None:
    questions = load().questionnaire
    options = [option for question in questions for option in question.response_options or ()]
    texts = [text for question in questions for text in (question.question, question.info)]
    texts += [option.name for option in options]

    assert [text for text in texts if not text or text != text.strip()] == []


def test_yes_and_no_are_shown_as_words() -> None:
    options = [option for question in load().questionnaire for option in question.response_options or ()]
    names = {option.value: option.name for option in options}

    assert (names["YES"], names["NO"]) == ("Yes", "No")


def test_encoded_questions_have_the_fields_of_the_interface() -> None:
    encoded = msgspec.json.decode(msgspec.json.encode(load()))

    assert list(encoded) == ["questionnaire"]
    for question in encoded["questionnaire"]:
        assert list(question) == ["ref", "question", "info", "responseType", "responseOptions", "conditions"]


def test_question_without_options_and_conditions_is_encoded_with_nulls() -> None:
    case_ref = msgspec.json.decode(msgspec.json.encode(load()))["questionnaire"][0]

    assert case_ref["responseOptions"] is None
    assert case_ref["conditions"] is None


def test_encoded_options_have_a_name_and_a_value() -> None:
    is_leasehold = msgspec.json.decode(msgspec.json.encode(load()))["questionnaire"][2]

    assert is_leasehold["responseOptions"] == [
        {"name": "Yes", "value": "YES"},
        {"name": "No", "value": "NO"},
    ]


def test_well_written_questionnaire_is_accepted() -> None:
    written = parse(WELL_WRITTEN)

    assert [question.ref for question in written.questionnaire] == ["let", "rent"]
    assert problems_in(written) == []


@pytest.mark.parametrize(
    ("written", "broken", "problem"),
    [
        pytest.param('ref = "rent"', 'ref = "let"', "'let': its ref is taken", id="ref twice"),
        pytest.param('options = "yes_no"\n', "", "'let': radio_button without options", id="no options"),
        pytest.param('"radio_button"', '"number"', "'let': number with options", id="needless options"),
        pytest.param('"NO"', '"YES"', "'let': an option value comes twice", id="option value twice"),
        pytest.param(
            '{ let = "YES" }',
            '{ let = "yes" }',
            "'rent': it depends on 'let' being 'yes'",
            id="condition on an answer that is no option",
        ),
        pytest.param(
            '{ let = "YES" }',
            '{ rent = "YES" }',
            "'rent': it depends on 'rent', which is not an earlier question",
            id="condition on itself",
        ),
        pytest.param(
            'ref = "let"',
            'ref = "let"\nconditions = { rent = "YES" }',
            "'let': it depends on 'rent', which is not an earlier question",
            id="condition on a later question",
        ),
        pytest.param('ref = "rent"', 'ref = ""', "'': a text is blank", id="blank ref"),
        pytest.param("What is the rent?", " ", "'rent': a text is blank", id="blank question"),
        pytest.param("Per year.", r"\n", "'rent': a text is blank", id="blank info"),
        pytest.param('name = "Yes"', 'name = ""', "'let': a text is blank", id="blank option name"),
        pytest.param('value = "NO"', 'value = ""', "'let': a text is blank", id="blank option value"),
    ],
)
def test_question_that_cannot_be_asked_is_found_by_its_ref(written: str, broken: str, problem: str) -> None:
    assert written in WELL_WRITTEN

    problems = problems_in(parse(WELL_WRITTEN.replace(written, broken)))

    assert any(found.startswith(f"question {problem}") for found in problems), problems


@pytest.mark.parametrize(
    ("written", "broken", "complaint"),
    [
        pytest.param("[options]", "[options", "Expected ']'", id="not TOML"),
        pytest.param("[options]", "title = 1\n[options]", "unknown field `title`", id="unknown field"),
        pytest.param("yes_no = [", "none = []\nyes_no = [", "length >= 1", id="set of no options"),
        pytest.param(
            'name = "Yes"', 'title = "Yes"', "unknown field `title`", id="option with unknown field"
        ),
        pytest.param('"yes_no"', '"maybe"', "'let': there are no options 'maybe'", id="unknown options"),
        pytest.param(
            '"radio_button"',
            '"select"\nlist = 1',
            r"unknown field `list` - at `\$.questions\[",
            id="question with unknown field",
        ),
        pytest.param('"currency"', '"slider"', "'slider' - at `", id="unknown response type"),
        pytest.param('{ let = "YES" }', "{ let = true }", "Expected `str`", id="answer not text"),
        pytest.param('info = "Per year."', "", "missing required field `info`", id="no info"),
        pytest.param('ref = "rent"', "", "missing required field `ref`", id="no ref"),
    ],
)
def test_badly_written_file_is_refused(written: str, broken: str, complaint: str) -> None:
    assert written in WELL_WRITTEN

    with pytest.raises(ValueError, match=complaint):
        parse(WELL_WRITTEN.replace(written, broken))


def test_etag_changes_only_with_the_questions() -> None:
    assert entity_tag(parse(WELL_WRITTEN)) == entity_tag(parse(WELL_WRITTEN))
    assert entity_tag(parse(WELL_WRITTEN)) != entity_tag(parse(WELL_WRITTEN.replace("tenants", "a tenant")))


async def test_questions_that_the_caller_already_has_are_not_sent_again(
    shared_client: httpx.AsyncClient,
) -> None:
    first = await shared_client.get(STRUCTURE)
    again = await shared_client.get(STRUCTURE, headers={"If-None-Match": first.headers["ETag"]})

    assert first.headers["ETag"].startswith('W/"')
    assert again.status_code == 304
    assert again.content == b""
    assert again.headers["X-Request-Id"]
    assert "Content-Type" not in again.headers
    for name in ("ETag", "Cache-Control"):
        assert again.headers[name] == first.headers[name]
    assert first.headers["Cache-Control"] == "private, no-cache"


@pytest.mark.parametrize(
    ("if_none_match", "status"),
    [
        ("*", 304),
        ("{tag}", 304),
        ("W/{tag}", 304),
        ('"other", W/{tag}', 304),
        ('"a, b" ,W/"other",{tag}', 304),
        ('"other"', 200),
        ('W/"other", "another"', 200),
        ("", 200),
        ("nonsense", 200),
        ('"*"', 200),
        ('"x{bare}"', 200),
        ("{bare}", 200),
    ],
)
async def test_etags_are_compared_weakly(
    shared_client: httpx.AsyncClient, if_none_match: str, status: int
) -> None:
    tag = (await shared_client.get(STRUCTURE)).headers["ETag"].removeprefix("W/")
    sent = if_none_match.format(tag=tag, bare=tag.strip('"'))

    assert (await shared_client.get(STRUCTURE, headers={"If-None-Match": sent})).status_code == status


async def test_etags_in_several_headers_are_one_list(shared_client: httpx.AsyncClient) -> None:
    tag = (await shared_client.get(STRUCTURE)).headers["ETag"]

    response = await shared_client.get(
        STRUCTURE, headers=[("If-None-Match", '"other"'), ("If-None-Match", tag)]
    )

    assert response.status_code == 304


async def test_etag_does_not_replace_a_token(shared_client: httpx.AsyncClient) -> None:
    tag = (await shared_client.get(STRUCTURE)).headers["ETag"]

    response = await shared_client.get(
        STRUCTURE, headers={"If-None-Match": tag, "Authorization": "Bearer nonsense"}
    )

    assert response.status_code == 401
