"""`python -m jaxdist.plan [CONFIG] --devices 64 --cluster h100-ndr`: which mesh, before it is paid for."""

from __future__ import annotations

import json
from pathlib import Path

from jaxdist.cluster.place import check_alone
from jaxdist.config import Config, Count, RequestError
from jaxdist.request import Extra, arguments, run, to_toml

DESCRIPTION = (
    "Rank every way to split the training of a model over so many devices of a cluster, by predicted time and memory. "
    "Nothing is run or compiled, and no device has to be there."
)
KNOBS = ("precision", "model", "optimizer", "train.global_batch_size", "parallel.rules")
EXTRAS = [
    Extra("devices", 8, "How many devices.", Count),
    Extra("cluster", "h100-ndr", "A cluster that jaxdist knows, or a TOML file that describes one."),
    Extra("why_not", "", "Tell why this mesh, such as 64x1x1, is not the first."),
    Extra("why", False, "Show the formula and the transfers behind each figure of the first."),
    Extra("save", "", "Write the first as a configuration for train into this TOML file."),
    Extra("json", False, "Print one JSON object on standard output, and nothing else."),
]


def main(argv: list[str] | None = None) -> int:
    asked = arguments(argv, "plan", DESCRIPTION, extras=EXTRAS, knobs=KNOBS)
    check_alone("plan")
    extras, config = asked.extras, asked.config
    if config.model.images:
        raise RequestError(f"plan knows models of text, and model.family is {config.model.family}; use gpt or llama")

    from jaxdist.planning.clusters import cluster
    from jaxdist.planning.search import text
    from jaxdist.planning.search.plan import search, why_not

    where = cluster(extras["cluster"])
    plan = search(resolved(config, where.gpu), extras["devices"], where)
    if extras["why_not"]:
        print(why_not(plan, extras["why_not"]))
    elif extras["why"]:
        print("\n".join(text.why(plan)))
    elif extras["json"]:
        print(json.dumps(text.json(plan)))
    else:
        print("\n".join(text.lines(plan, asked.positional or "gpt_tiny")))
    if extras["save"]:
        Path(extras["save"]).write_text(to_toml(plan.ranked[0].config))
    return 0


def resolved(config: Config, gpu: str) -> Config:
    """With the precision that `auto` means there."""
    if config.precision != "auto":
        return config
    return config.model_copy(update={"precision": "float32" if gpu == "cpu" else "bfloat16"})


if __name__ == "__main__":
    run(main)
