"""`python -m jaxdist.evaluate RUN`: judge the weights of a checkpoint by losses, or by multiple-choice questions."""

from __future__ import annotations

import json
from pathlib import Path

from jaxdist.cluster.process_env import find
from jaxdist.config import RequestError
from jaxdist.request import Enough, Extra, Request, arguments, run
from jaxdist.request.knobs import option
from jaxdist.values import Checkpoint, FileName

DESCRIPTION = (
    "Compute the loss of a run's checkpoint on the whole held-out part of its data, on any mesh; with "
    "data.validation_path, the loss, perplexity and bits per byte of each file that it names. RUN may also be a folder "
    "of Hugging Face, with config.json and *.safetensors, into which nothing is written; its rows have "
    "--model.sequence tokens."
)
EXTRAS = [
    Extra("checkpoint", "latest", "Step to use: latest, best (by validation loss) or a number.", Checkpoint),
    Extra("choices", "", "Answer the multiple-choice questions of this .jsonl instead; empty: no questions.", FileName),
    Extra("json", False, "Print one JSON object on standard output, and nothing else."),
]


def main(argv: list[str] | None = None) -> int:
    """Print how well the weights of a checkpoint do. Return the exit code."""
    request = arguments(argv, "evaluate", DESCRIPTION, positional="RUN", extras=EXTRAS, pretrained=True)
    config = request.config
    check_choices(request)
    place = find(config.cluster)

    # jax is imported only now, so that problems of the request are reported at once.
    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job
    from jaxdist.data.multiple_choice import read_questions
    from jaxdist.training.evaluation import encoded, on_files, on_held_out, on_questions
    from jaxdist.training.restore import restore

    with Job(place, config, enough=Enough(config)) as job:
        check_request(request.text)
        choices = request.extras["choices"]
        if choices:
            # Wrong questions are reported before the weights are read.
            questions = read_questions(Path(choices))
            rows = encoded(config, questions)
        trained = restore(config, request.extras["checkpoint"])
        if choices:
            found = on_questions(trained, job, questions, rows)
        elif config.data.validation_path and not config.model.images:
            found = on_files(trained, job)
        else:
            found = on_held_out(trained, job)
        if job.env.leader:
            print(json.dumps(found.figures) if request.extras["json"] else "\n".join(found.lines))
        return job.end(0)


def check_choices(request: Request) -> None:
    """Refuse questions for a model without text, and options that have no effect beside questions."""
    path = request.extras["choices"]
    if not path:
        return
    if request.config.model.images:
        family = request.config.model.family
        raise RequestError(f"the run has model.family {family}, which answers no questions; leave out --choices")
    unused = [option(name) for name in request.overrides if name.startswith("data.") and name != "data.tokenizer"]
    if unused:
        raise RequestError(f"--choices '{path}' is all that is read: {', '.join(unused)} has no effect; leave it out")


if __name__ == "__main__":
    run(main)
