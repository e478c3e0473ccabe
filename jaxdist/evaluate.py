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
    task = trained.run.task
    if task.fingerprint != trained.data:
        print(f"note: this is not the data that the run was trained on{task.kept}", file=sys.stderr)
        task.keep(RunFolder(asked.config.run_dir).tokenizer)
    with jax.set_mesh(trained.run.mesh):
        found = trained.run.validate(trained.params, trained.variables, batches=0)
    further = "".join(f"  {name} {value:.2%}" for name, value in found.items() if name != "loss")
    print(
        f"step {trained.step}  validation loss {found['loss']:.4f} nats per {task.unit}{further}  "
        f"({task.baseline_name} {task.baseline():.4f})"
    )
    return 0


if __name__ == "__main__":
    run(main)
