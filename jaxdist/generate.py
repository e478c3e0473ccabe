"""`python -m jaxdist.generate RUN`: generate text from a run's checkpoint, or from pretrained weights, on any mesh."""

from __future__ import annotations

from functools import partial

from jaxdist.cluster.process_env import find
from jaxdist.config import RequestError
from jaxdist.request import JOB_KNOBS, LAYOUT_KNOBS, Enough, Extra, arguments, run
from jaxdist.values import Checkpoint, CountOrZero, NonNegativeFloat32, Prompt, Samples, Seed, Tokens

DESCRIPTION = (
    "Generate text from a run's checkpoint. Needs only the run folder; all devices of the mesh take part. RUN may also "
    "be a folder of Hugging Face, with config.json and *.safetensors, into which nothing is written; the model then "
    "sees --model.sequence tokens."
)
EXTRAS = [
    Extra("checkpoint", "latest", "Step to use: latest, best (by validation loss) or a number.", Checkpoint),
    Extra("prompt", "def ", "Text to continue; the model sees its last model.sequence tokens.", Prompt),
    Extra("tokens", 100, "Tokens to generate, at most.", Tokens),
    Extra("samples", 1, "Texts to generate.", Samples),
    Extra("temperature", 0.8, "Divisor of the logits; 0: always take the most likely token.", NonNegativeFloat32),
    Extra("top_k", 50, "Sample from this many most likely tokens; 0: all.", CountOrZero),
    Extra("seed", 0, "Seed of the sampling.", Seed),
]


def main(argv: list[str] | None = None) -> int:
    """Print texts sampled from a checkpoint. Return the exit code."""
    knobs = (*LAYOUT_KNOBS, *JOB_KNOBS)
    request = arguments(argv, "generate", DESCRIPTION, positional="RUN", extras=EXTRAS, knobs=knobs, pretrained=True)
    config = request.config
    extras = request.extras
    if config.model.images:
        raise RequestError(f"the run has model.family {config.model.family}, which generates no text; name another run")

    place = find(config.cluster)

    # jax is imported only now, so that problems of the request are reported at once.
    from jaxdist.cluster.consensus import check_request
    from jaxdist.cluster.heartbeat import STEPPING
    from jaxdist.cluster.job import Job
    from jaxdist.huggingface.given_tokenizer import largest_id
    from jaxdist.training.decoding import Choice, Decoding, continued
    from jaxdist.training.restore import restore, tokenizer_of

    with Job(place, config, enough=Enough(config)) as job:
        check_request(request.text)
        tokenizer, special = tokenizer_of(config.folder)
        trained = restore(config, extras["checkpoint"], batch=False)
        prompt = tokenizer.encode(extras["prompt"], add_special_tokens=False).ids
        if special.bos is not None:
            prompt = [special.bos, *prompt]
        texts = continued(
            Decoding(trained.run, trained.params),
            [prompt] * extras["samples"],
            extras["tokens"],
            Choice(extras["temperature"], extras["top_k"], entries=largest_id(tokenizer) + 1),
            extras["seed"],
            stops=special.stops,
            moving=partial(job.note, STEPPING),
        )
        # Every process has the texts; the leader prints them.
        if job.env.leader:
            for number, ids in enumerate(texts, start=1):
                if extras["samples"] > 1:
                    print(f"--- {number}")
                print(tokenizer.decode(ids))
        return job.end(0)


if __name__ == "__main__":
    run(main)
