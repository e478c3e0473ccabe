"""`python -m jaxdist.generate RUN`: text from a run's checkpoint, on any mesh."""

from __future__ import annotations

from jaxdist.cluster.process_env import find
from jaxdist.config import RequestError
from jaxdist.request import JOB_KNOBS, LAYOUT_KNOBS, Enough, Extra, arguments, run
from jaxdist.values import Checkpoint, CountOrZero, NonNegativeFloat32, Prompt, Samples, Seed, Tokens

DESCRIPTION = "Write text with a run's checkpoint. Needs only the run folder; every device of the mesh writes samples."
EXTRAS = [
    Extra("checkpoint", "latest", "Which step: latest, best (by validation loss) or a number.", Checkpoint),
    Extra("prompt", "def ", "Text to go on from; the model reads its last model.sequence tokens.", Prompt),
    Extra("tokens", 100, "Tokens to write.", Tokens),
    Extra("samples", 1, "Texts to write.", Samples),
    Extra("temperature", 0.8, "Divides the logits; 0 takes the likeliest token.", NonNegativeFloat32),
    Extra("top_k", 50, "Choose among this many likeliest tokens; 0: all.", CountOrZero),
    Extra("seed", 0, "Seed of the choices.", Seed),
]


def main(argv: list[str] | None = None) -> int:
    knobs = (*LAYOUT_KNOBS, *JOB_KNOBS)
    asked = arguments(argv, "generate", DESCRIPTION, positional="RUN", extras=EXTRAS, knobs=knobs)
    extras = asked.extras
    if asked.config.model.images:
        raise RequestError(
            f"the run is of model.family {asked.config.model.family}, which writes no text; name another"
        )

    place = find(asked.config.cluster)

    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.job import Job
    from jaxdist.cluster.phases import STEPPING
    from jaxdist.training.restore import restore
    from jaxdist.training.run_dir import RunFolder
    from jaxdist.training.sampling import Choice, sample

    with Job(place, asked.config, enough=Enough(asked.config)) as job:
        check_request(asked.text)
        tokenizer = RunFolder(asked.config.run_dir).load_tokenizer()
        trained = restore(asked.config, extras["checkpoint"], batch=False)
        choice = Choice(extras["temperature"], extras["top_k"])
        prompt = tokenizer.encode(extras["prompt"], add_special_tokens=False).ids
        how = (extras["tokens"], extras["samples"], choice, extras["seed"])
        texts = sample(trained, prompt, *how, moving=lambda: job.note(STEPPING))
        for number, ids in enumerate(texts if job.place.leader else []):
            if extras["samples"] > 1:
                print(f"--- {number + 1}")
            print(tokenizer.decode(ids))
        return job.end(0)


if __name__ == "__main__":
    run(main)
