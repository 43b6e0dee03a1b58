"""Trouble that is told to a person."""


class LocalStackError(Exception):
    """The text says in one line what is wrong and what to do; lines of a log may follow it."""


class Interrupted(LocalStackError):
    """The end was asked for while something was still starting."""
