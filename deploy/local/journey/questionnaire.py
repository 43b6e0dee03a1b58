"""The questions of the customer's form: fetched, divided into steps, and shown by their conditions."""

from collections import defaultdict
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httpx

Question = Mapping[str, Any]

_AT_ONCE = 4


class Questionnaire:
    """The questions as the API last sent them. Each call asks whether they are current."""

    def __init__(self) -> None:
        self._etag: dict[str, str] = {}
        self._questions: list[Question] = []

    async def fetch(self, http: httpx.AsyncClient, headers: dict[str, str]) -> httpx.Response:
        """Fetch the questions, unless the API answers 304. Raises HTTPStatusError."""
        response = await http.get("/v1/questionnaire/structure", headers=headers | self._etag)
        if response.status_code != HTTPStatus.NOT_MODIFIED:
            self._questions = response.raise_for_status().json()["data"]["questionnaire"]
            self._etag = {"If-None-Match": response.headers["ETag"]}
        return response

    def steps(self, answers: Mapping[str, str]) -> dict[int, list[Question]]:
        """Return the steps that have a question to show, by their numbers: a few questions at once.

        None of a step depends on another of the same step, and other answers change no number.
        """
        shown, steps = self.shown(answers), defaultdict[int, list[Question]](list)
        number, of_step = 1, set[str]()
        for question in self._questions:
            if (question["conditions"] or {}).keys() & of_step or len(of_step) == _AT_ONCE:
                number, of_step = number + 1, set()
            of_step.add(question["ref"])
            if question in shown:
                steps[number].append(question)
        return steps

    def shown(self, answers: Mapping[str, str]) -> list[Question]:
        """Return the questions that these answers show, in order.

        An answer to a question that is not shown counts as not given, so it shows no other question.
        """
        shown: list[Question] = []
        given: dict[str, str] = {}
        for question in self._questions:
            if (question["conditions"] or {}).items() <= given.items():
                shown.append(question)
                if question["ref"] in answers:
                    given[question["ref"]] = answers[question["ref"]]
        return shown
