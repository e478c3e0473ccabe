"""`python -m jaxdist.evaluate RUN`: judge the weights of a checkpoint by losses, or by multiple-choice questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jaxdist.cluster.process_env import find
from jaxdist.config import Config, RequestError
from jaxdist.config.values import Checkpoint, Count, FileName
from jaxdist.request import JSON, Enough, Extra, Request, arguments, run
from jaxdist.request.knobs import option

if TYPE_CHECKING:
    from jaxdist.data.multiple_choice import Question

DESCRIPTION = (
    "Compute the loss of a run's checkpoint on the whole held-out part of its data, on any mesh; with "
    "data.validation_path, the loss, perplexity and bits per byte of each file that it names. RUN may also be a folder "
    "of Hugging Face, with config.json and *.safetensors, into which nothing is written; its rows have "
    "--model.sequence tokens."
)
EXTRAS = [
    Extra("checkpoint", "latest", "Step to use: latest, best (by validation loss) or a number.", Checkpoint),
    Extra("choices", "", "Answer the multiple-choice questions of this .jsonl instead; empty: no questions.", FileName),
    Extra("choices_skip", False, "Leave out the questions of --choices that cannot be scored, and count them."),
    Extra("choices_apart", False, "Encode context and choice of --choices apart, so that no token spans their join."),
    Extra("stride", None, "Rolling loss: windows begin so many tokens apart; each token counts once.", Count),
    JSON,
]


def main(argv: list[str] | None = None) -> int:
    """Print how well the weights of a checkpoint do. Return the exit code."""
    request = arguments(argv, "evaluate", DESCRIPTION, positional="RUN", extras=EXTRAS, pretrained=True)
    config = request.config
    questions = check_files(request)
    place = find(config.cluster)

    # jax is imported only now, so that problems of the request are reported at once.
    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job
    from jaxdist.training.copies import check_named
    from jaxdist.training.evaluation import encoded, on_files, on_held_out, on_questions
    from jaxdist.training.restore import restore

    with Job(place, config, enough=Enough(config)) as job:
        check_request(request.text)
        check_named(config, reads_run=True)
        request.tell_unused(job.env.processes)
        job.keep_programs()
        apart, skip = request.extras["choices_apart"], request.extras["choices_skip"]
        # Questions that cannot be answered are reported before the weights are read.
        rows = encoded(config, questions, apart, skip) if questions else None
        trained = restore(config, request.extras["checkpoint"], batch=rows is None)
        if rows:
            found = on_questions(trained, job, rows)
        elif config.data.validation_path and not config.model.images:
            found = on_files(trained, job, request.extras["stride"])
        else:
            found = on_held_out(trained, job, request.extras["stride"])
        if job.env.leader:
            print(json.dumps(found.figures, allow_nan=False) if request.extras["json"] else "\n".join(found.lines))
        return job.end(0)


def check_files(request: Request) -> list[Question]:
    """Return the questions of --choices, if it is given. Raises `RequestError` for files that cannot be read as asked.

    The held-out part of the run's own data is looked at later, by those who open it.
    """
    # They import numpy, which --help does not need.
    from jaxdist.data.multiple_choice import read_questions
    from jaxdist.data.naming.paths import held_out_problems

    config = request.config
    choices = request.extras["choices"]
    if choices:
        check_choices(request, choices)
        return read_questions(Path(choices))
    alone = [option(name) for name in ("choices_skip", "choices_apart") if request.extras[name]]
    problems = [] if config.model.images else held_out_problems(config.data.validation_path)
    problems += stride_problems(config, request.extras["stride"])
    if alone:
        problems.append(f"{' and '.join(alone)} has an effect beside --choices only; add --choices, or leave it out")
    if problems:
        raise RequestError(*problems)
    return []


def stride_problems(config: Config, stride: int | None) -> list[str]:
    """Return a sentence where a rolling loss is asked for that there cannot be."""
    if stride is None:
        return []
    if config.model.images:
        return [
            f"--stride is {stride}, but the run has model.family {config.model.family}, without a text; leave it out"
        ]
    if stride > config.model.sequence:
        return [
            f"--stride {stride} is more than model.sequence {config.model.sequence}, so that tokens between two "
            f"windows would not count; lower it"
        ]
    return []


def check_choices(request: Request, choices: str) -> None:
    """Refuse questions for a model without text, and options that have no effect beside questions."""
    family = request.config.model.family
    if request.config.model.images:
        raise RequestError(f"the run has model.family {family}, which answers no questions; leave out --choices")
    unused = [option(name) for name in request.overrides if name.startswith("data.") and name != "data.tokenizer"]
    if request.extras["stride"] is not None:
        unused.append(option("stride"))
    if unused:
        raise RequestError(f"beside --choices '{choices}' no data are read, so leave out {', '.join(unused)}")


if __name__ == "__main__":
    run(main)
