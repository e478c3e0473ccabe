"""Options that are several numbers: `1,2,4,8`."""

from __future__ import annotations

from collections.abc import Callable

from pydantic_core import PydanticCustomError


def numbers(name: str, least: int, most: int, example: str) -> Callable[[str], str]:
    """A validator of ascending whole numbers with commas between."""

    def wrong(problem: str, **values: object) -> PydanticCustomError:
        return PydanticCustomError(name, problem, {"name": name, "example": example, **values})

    def check(text: str) -> str:
        words = text.split(",")
        for word in words:
            if not (word.strip().isascii() and word.strip().isdigit()):
                raise wrong("'{word}' is no whole number; write {name} such as {example}", word=word.strip()[:20])
            if not least <= int(word[:20]) <= most:
                bounds = dict(word=word.strip()[:20], least=least, most=most)
                raise wrong("{word} is not from {least} to {most}; write {name} such as {example}", **bounds)
        found = as_list(text)
        if found != sorted(set(found)):
            better = ",".join(map(str, sorted(set(found))))
            raise wrong("write each of the {name} once, ascending: {better}", better=better)
        return text

    return check


def as_list(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]
