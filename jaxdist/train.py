"""`python -m jaxdist.train`: train a model."""

from __future__ import annotations

from jaxdist.request import arguments, run

DESCRIPTION = (
    "Train a language model on a mesh of devices. CONFIG is a TOML file or the name of a shipped one; without it, "
    "a small GPT learns the source text of Python's own standard library."
)


def main(argv: list[str] | None = None) -> int:
    config = arguments(argv, "train", DESCRIPTION).config

    from jaxdist.training.folder import RunFolder

    folder = RunFolder(config.run_dir)
    config = folder.enter(config)  # before jax is imported, and long before anything compiles

    from jaxdist.training.run import Run
    from jaxdist.training.trainer import train

    return train(Run(config), folder)


if __name__ == "__main__":
    run(main)
