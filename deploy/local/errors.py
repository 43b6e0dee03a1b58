"""Errors whose text is shown to the user."""


class LocalStackError(Exception):
    """The text says in one line what is wrong and what to do. The end of a log may follow."""


class Interrupted(Exception):
    """The user asked for the end while something was still starting."""
