"""`python -m jaxdist.data PATH`: look at data before a training. No jax here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import RequestError
from jaxdist.data.paths import open_sources
from jaxdist.output.units import counted
from jaxdist.process.exit_codes import DONE
from jaxdist.request import JSON, Request, arguments, run
from jaxdist.request.commandline import CONFIG_ENDING
from jaxdist.request.knobs import KNOBS, within

if TYPE_CHECKING:
    from jaxdist.data.survey.look import Asked

DESCRIPTION = (
    "Look at data before a training: what the files are, documents, their lengths as a picture, duplicates, tokens, "
    "how many documents rows would cut, samples with the borders of tokens, and what a training would refuse. Reads "
    "everything. The exit code is 2 if something is refused."
)
EXTRAS = [JSON]

OF_ROWS = ("data.pack", "data.augment", "data.prefetch")
"""Knobs of data that say nothing of what is read."""

USED = (*(name for name in KNOBS if within(name, ["data"]) and name not in OF_ROWS), "model.sequence", "model.vocab")


def main(argv: list[str] | None = None) -> int:
    """Print what data are. Return the exit code."""
    request = arguments(argv, "data", DESCRIPTION, positional="PATH", extras=EXTRAS, knobs=USED)
    check_alone("data")
    if request.config.model.images:
        raise RequestError(
            f"{request.positional} has model.family {request.config.model.family}, which trains on images, and only "
            "text and tokens are looked at"
        )

    mixture = request.config.data.mixture
    if mixture:
        raise RequestError(
            f"'{request.positional}' is a mixture of {counted(len(mixture.sources), 'source')}; look at one at a time, "
            f"such as '{mixture.sources[0].path}'"
        )
    sources = open_sources(request.config.data)

    # Imported only now, because they import numpy, which --help does not need.
    from jaxdist.data.survey import report
    from jaxdist.data.survey.look import look
    from jaxdist.training.console import Screen
    from jaxdist.training.data_progress import DataProgress

    screen = Screen()
    found = look(_asked(request), sources, DataProgress(_nobody_waits, screen))
    screen.pause()
    print(json.dumps(found.figures) if request.extras["json"] else "\n".join(report.lines(found.figures)), flush=True)
    if found.problems:
        raise RequestError(*found.problems)
    return DONE


def _asked(request: Request) -> Asked:
    from jaxdist.data.survey.look import Asked

    model = request.config.model
    # In a config of the user, model.vocab is that of the tokenizer.
    own_vocab = "model.vocab" in request.overrides or (request.positional or "").endswith(CONFIG_ENDING)
    return Asked(request.config.data, model.vocab, own_vocab, model.sequence)


def _nobody_waits() -> None:
    """Do nothing: no other process watches this one."""


if __name__ == "__main__":
    run(main)
