"""Write the table of docs/how-to/fine-tuning-sizes.md: what `jaxdist plan` chooses for each model, way and place.

    python scripts/fine_tuning_sizes.py            # rewrite the table
    python scripts/fine_tuning_sizes.py --check    # print it and end with 1 where the page has another

Nothing is run or compiled. A cell is the first plan of `python -m jaxdist.plan ... --json`, or a dash where it refuses,
since nothing fits.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist import plan
from jaxdist.config import RequestError
from jaxdist.request import load

PAGE = Path(__file__).resolve().parent.parent / "docs" / "how-to" / "fine-tuning-sizes.md"
MODELS = {"0.6B": "qwen3_06b", "8B": "qwen3_8b", "70B": "llama31_70b"}
WAYS = {
    "all weights": ["--precision=mixed"],
    "LoRA": ["--model.lora-rank=16", "--model.lora-base=bfloat16"],
    "QLoRA": ["--model.lora-rank=16", "--model.lora-base=nf4"],
}
BATCH = ["--model.sequence=2048", "--train.global-batch-size=16"]
PLACES = {
    "1 x RTX 4090": ("rtx4090", 1),
    "1 x H100": ("h100-ndr", 1),
    "8 x H100": ("h100-ndr", 8),
    "16 x H100": ("h100-ndr", 16),
}
ONE_CARD = """\
gpu = "rtx4090"
per_host = 1
matmul = 0.7
overlap = 1.0
sources = ["one card alone: no link is used, and memory alone is asked for"]

[inside]
bandwidth = 25e9
latency = 1e-5

[across]
bandwidth = 1e9
latency = 1e-4
"""
"""A cluster of a single card; it is never asked for more than one of them."""


def command(model: str, way: str, place: str) -> list[str]:
    """Return the arguments of `jaxdist plan` for a cell."""
    cluster, devices = PLACES[place]
    return [MODELS[model], f"--devices={devices}", f"--cluster={cluster}", *WAYS[way], *BATCH]


def first_plan(arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the first plan of a command; None where nothing fits."""
    with tempfile.TemporaryDirectory() as folder:
        card = Path(folder) / "rtx4090.toml"
        card.write_text(ONE_CARD)
        known = [one.replace("--cluster=rtx4090", f"--cluster={card}") for one in arguments]
        out = io.StringIO()
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                plan.main([*known, "--json"])
        except RequestError as error:
            if not any("fits" in problem or "memory" in problem for problem in error.problems):
                raise
            return None
    return json.loads(out.getvalue())["ranked"][0]


def kept(name: str) -> tuple[str, str]:
    """Return the ZeRO stage and the remat of a shipped configuration."""
    config = load(name, {})
    return str(config.parallel.zero), str(config.model.remat)


def cell(model: str, way: str, place: str) -> str:
    """Return what the table says of a model, a way and a place."""
    found = first_plan(command(model, way, place))
    if found is None:
        return "-"
    # What a plan leaves out is as in the configuration.
    zero, remat = kept(MODELS[model])
    options = {"parallel.zero": zero, "model.remat": remat, **found["options"]}
    words = [f"{found['memory'] / 2**30:.1f} GiB"]
    if PLACES[place][1] > 1:
        words += [f"`{options['mesh']}`", f"ZeRO {options['parallel.zero']}"]
    if options["model.remat"] != "none":
        words.append(f"remat {options['model.remat']}")
    return ", ".join(words)


def table() -> list[str]:
    """Return the lines of the table."""
    lines = [f"| | {' | '.join(PLACES)} |", f"|---|{'---|' * len(PLACES)}"]
    for model in MODELS:
        for way in WAYS:
            cells = [cell(model, way, place) for place in PLACES]
            lines.append(f"| {model}, {way} | {' | '.join(cells)} |")
    return lines


def parts(text: str) -> tuple[str, list[str], str]:
    """Return what a page has before the table, the lines of the table, and what it has behind it."""
    begin = text.index("| | ")
    end = text.index("\n\n", begin)
    return text[:begin], text[begin:end].split("\n"), text[end:]


def main() -> int:
    """Write or check the table. Return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and end with 1 where the page differs")
    before, there, behind = parts(PAGE.read_text())
    asked = parser.parse_args()
    made = table()
    if asked.check:
        print("\n".join(made))
        return int(made != there)
    PAGE.write_text(before + "\n".join(made) + behind)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
