"""docs/troubleshooting.md explains what the code can say, each message on one page only, and the exit codes it has."""

import re
from functools import cache
from pathlib import Path

from jaxdist.process import exit_codes
from tests.test_docs import texts

ROOT = Path(__file__).parents[2]
PAGE, SLURM = ((ROOT / "docs" / name).read_text() for name in ("troubleshooting.md", "how-to/slurm.md"))

OURS, OTHERS = PAGE.split("## Of others")
MESSAGES = [found for found in re.findall(r"^\| `(.+?)` \|", OURS, re.MULTILINE) if found != "message"]


@cache
def said() -> frozenset[str]:
    """All texts of the code; one `…` for values in a row, and also where a template has a name in braces."""
    found = set.union(*(texts(path) for path in (ROOT / "jaxdist").rglob("*.py")))
    found |= {re.sub(r"\{[\w.:,]*\}", "…", text) for text in found}
    return frozenset(re.sub("…+", "…", text) for text in found)


def is_ours(message: str) -> bool:
    return any(message in text for text in said())


def test_a_message_that_is_explained_is_one_of_ours():
    assert [message for message in MESSAGES if not is_ours(message)] == []


def test_a_message_that_is_gone_is_seen():
    assert not is_ours("mesh … does not use all quantum devices")


def test_no_message_leaves_the_number_to_the_reader():
    """`units.counted` writes "1 block" and "2 blocks"."""
    assert [text for text in said() if re.search(r"[a-z]{2}\((?:s|es)\)(?:\W|$)", text) and "`" not in text] == []


def test_there_are_many():
    assert len(MESSAGES) >= 100


def test_no_message_is_explained_twice():
    """Neither on this page, nor here and on that of Slurm, nor as a part of a longer one."""
    of_slurm = re.findall(r"^\| `(.+?)` \|", SLURM.split("## Failures, by message")[1], re.MULTILINE)
    everywhere = [*MESSAGES, *of_slurm]
    assert [one for one in everywhere if sum(one in other for other in everywhere) > 1] == []


def test_what_is_said_to_be_of_others_is_not_ours():
    messages = re.findall(r"^\| `(.+?)`", OTHERS, re.MULTILINE)
    assert len(messages) > 10
    assert [message for message in messages if is_ours(message)] == []


def test_every_row_has_a_message_a_cause_and_a_remedy():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row.count(" | ") != 2] == []


def test_exit_codes_are_those_of_the_code():
    codes = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)} == codes
