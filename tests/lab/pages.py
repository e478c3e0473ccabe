"""What the pages for students show is what their commands print."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
ROUNDING = re.compile(r"\d\.\de[+-]\d\d *")


def assert_pasted(lines: list[str], page: str) -> None:
    """Line by line, but for differences in rounding, which each version and machine has its own of."""
    blocks = [block.strip("\n").splitlines() for block in (DOCS / page).read_text().split("```")[1::2]]
    (shown,) = (block for block in blocks if block[0] == lines[0])
    assert [ROUNDING.sub("#", line) for line in shown] == [ROUNDING.sub("#", line) for line in lines]
