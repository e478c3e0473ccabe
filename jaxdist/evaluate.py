"""`python -m jaxdist.evaluate RUN`: the validation loss of a run's checkpoint, on any mesh."""

from __future__ import annotations

import sys

from jaxdist.request import Extra, arguments, run

DESCRIPTION = "Compute the loss of a run's checkpoint on the whole held-out part of its data, on any mesh."
CHECKPOINT = Extra("checkpoint", "latest", "Which step: latest, best (by validation loss) or a number.")


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "evaluate", DESCRIPTION, positional="RUN", extras=[CHECKPOINT])

    import jax

    from jaxdist.training.folder import RunFolder
    from jaxdist.training.run import restore

    trained = restore(asked.config, asked.extras["checkpoint"])
    if trained.run.corpus.fingerprint != trained.data:
        print("note: this is not the data that the run was trained on; the run's tokenizer is used", file=sys.stderr)
        trained.run.use_tokenizer(RunFolder(asked.config.run_dir).tokenizer)
    with jax.set_mesh(trained.run.mesh):
        loss = trained.run.validation_loss(trained.params, batches=0)
    unigram = trained.run.corpus.validation.unigram_entropy()
    print(f"step {trained.step}  validation loss {loss:.4f} nats per token  (unigram entropy {unigram:.4f})")
    return 0


if __name__ == "__main__":
    run(main)
