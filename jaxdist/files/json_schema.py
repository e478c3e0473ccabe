"""Say what the keys of a small JSON file may be, and refuse anything else by the name of its key. No jax here.

A table of rules belongs to each file: `huggingface/schema.py` has the rules for a folder of Hugging Face,
`training/checkpoint/step_dir.py` the rules for a step of a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxdist.config.values import path_error

LARGEST_COUNT = 2**53
"""No file has a larger whole number: beyond it, floats skip some."""

LARGEST_ID = 2**31
"""The ids of tokens are below this."""

LONGEST_WORD = 200
"""Characters of a name, a digest or a mesh: six axes of 1,024 have 72."""

SHOWN = 60
"""Characters of a value that a sentence shows."""


class Rule(NamedTuple):
    """What the value of a key may be."""

    words: str
    """The values, as a sentence has them after "must be"."""
    holds: Callable[[Any], bool]

    def __or__(self, other: Rule) -> Rule:
        """Return the rule that either of two holds."""
        return Rule(f"{self.words} or {other.words}", lambda value: self.holds(value) or other.holds(value))


Rules = Mapping[str, Rule]
"""The rule of each key; a key may be absent, and one without a rule may be anything."""


def wrong_values(rules: Rules, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield for each value that breaks its rule how it does: `eos_token_id is -1, which must be a token id`."""
    for key, rule in rules.items():
        if key in content and not rule.holds(content[key]):
            yield f"{key} is {short(content[key])}, which must be {rule.words}"


def short(value: object) -> str:
    """Return a value as JSON writes it, without control characters, and shortened if it is long."""
    words = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 4] + " ..."


def is_whole(value: object, least: int = 0, below: int = LARGEST_COUNT) -> bool:
    """Return whether a value is a whole number in these bounds; true and false are not."""
    return type(value) is int and least <= value < below


def is_number(value: object) -> bool:
    """Return whether a value is a finite number that a float holds."""
    if type(value) is float:
        return math.isfinite(value)
    return is_whole(value, -LARGEST_COUNT)


def list_of(one: Rule, words: str) -> Rule:
    """Return the rule of a list whose entries all hold `one`."""
    return Rule(words, lambda value: isinstance(value, list) and all(one.holds(entry) for entry in value))


def object_of(words: str, rules: Rules) -> Rule:
    """Return the rule of an object that has all of these keys, and holds their rules."""

    def holds(value: Any) -> bool:
        return isinstance(value, dict) and rules.keys() <= value.keys() and not any(wrong_values(rules, value))

    return Rule(words, holds)


NULL = Rule("null", lambda value: value is None)
FLAG = Rule("true or false", lambda value: isinstance(value, bool))
TEXT = Rule("a text", lambda value: isinstance(value, str))
WORD = Rule(
    f"a text of at most {LONGEST_WORD} characters", lambda value: TEXT.holds(value) and len(value) <= LONGEST_WORD
)
COUNT = Rule("a whole number from 0 on", is_whole)
NUMBER = Rule("a number", is_number)
PATH = Rule("a path", lambda value: isinstance(value, str) and value != "" and not path_error(value))
TOKEN_ID = Rule(f"a token id (0 to {LARGEST_ID - 1:,})", lambda value: is_whole(value, 0, LARGEST_ID))
TOKEN_IDS = TOKEN_ID | list_of(TOKEN_ID, "a list of them") | NULL
