"""Options that are several numbers: `1,2,4,8`."""

from __future__ import annotations

from collections.abc import Callable

from pydantic_core import PydanticCustomError


def numbers(name: str, least: int, most: int, example: str) -> Callable[[str], str]:
    """Return a validator of ascending integers from `least` to `most`, separated by commas.

    Error messages use `name` and `example`.
    """

    def error(problem: str, **values: object) -> PydanticCustomError:
        return PydanticCustomError(name, problem, {"name": name, "example": example, **values})

    def check(text: str) -> str:
        for word in text.split(","):
            word = word.strip()
            if not (word.isascii() and word.isdigit()):
                raise error("'{word}' is not a whole number; write {name} such as {example}", word=word[:20])
            # Python refuses to convert thousands of digits, and 20 are too many already.
            if not least <= int(word[:20]) <= most:
                problem = "{word} is not from {least} to {most}; write {name} such as {example}"
                raise error(problem, word=word[:20], least=least, most=most)
        values = as_list(text)
        ascending = sorted(set(values))
        if values != ascending:
            better = ",".join(str(value) for value in ascending)
            raise error("write each of the {name} once, ascending: {better}", better=better)
        return text

    return check


def as_list(text: str) -> list[int]:
    """Return the numbers of a valid text."""
    return [int(word) for word in text.split(",")]
