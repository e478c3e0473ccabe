"""`python -m jaxdist.lab NAME`: run one of the labs; without a name, list them."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any, Protocol

from jaxdist.cluster.place import check_alone
from jaxdist.config import Count, CountOrZero, RequestError, nearest
from jaxdist.request import Extra, arguments, run

LABS = {
    "all-reduce": "algorithms of all-reduce: their messages counted, and how they grow with the number of nodes",
    "fsdp-walkthrough": "one step of fully sharded training, phase by phase: what moves and what every device holds",
    "model-parallel": "one layer on each of two devices: the same result, and a device that always waits",
    "schedules": "pipeline schedules drawn, and their bubble and memory beside the formulas",
}
"""Name -> what it shows. Its module, of the same name, has a `measure` of its options that returns a `Result`."""

OPTIONS = {
    "all-reduce": (
        Extra("devices", 8, "Nodes, K.", Count),
        Extra("algorithm", "all", "Which one: naive, direct, ring, halving, doubling, tree, parameter-server, or all."),
        Extra("picture", "", "Draw their steps on four nodes, and their cost over K, into this PNG file."),
    ),
    "schedules": (
        Extra("schedule", "all", "Which one: gpipe, 1f1b, interleaved, zb-h1, zb-u, or all of them."),
        Extra("stages", 4, "Stages, S.", Count),
        Extra("microbatches", 8, "Micro-batches, M.", Count),
        Extra("virtual_stages", 0, "Chunks on each rank, v; 0: 2 for interleaved, 1 for the others.", CountOrZero),
        Extra("picture", "", "Draw the timelines into this PNG file."),
    ),
}
"""Name -> its options, where it has more than --json. They are here, so that help imports no lab."""

JSON = Extra("json", False, "Print one JSON object on standard output, and nothing else.")


class Result(Protocol):
    passed: bool
    """Whether everything that the lab claims was seen."""

    def json(self) -> dict[str, Any]: ...

    def lines(self) -> list[str]:
        """The same for a person."""
        ...


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m jaxdist.lab NAME [--json] [--help]\n\nlabs:")
        print("\n".join(f"  {name:<18}{line}" for name, line in LABS.items()))
        return 0
    name, *rest = argv
    if name not in LABS:
        raise RequestError(f"there is no lab '{name}'; {nearest(name, LABS)}")
    extras = [JSON, *OPTIONS.get(name, ())]
    asked = arguments(rest, f"lab {name}", f"Shows {LABS[name]}.", positional=None, extras=extras, knobs=())
    check_alone("lab")
    chosen = dict(asked.extras)
    as_json = chosen.pop("json")
    result: Result = importlib.import_module(f"jaxdist.lab.{name.replace('-', '_')}").measure(**chosen)
    print(json.dumps(result.json()) if as_json else "\n".join(result.lines()))
    return 0 if result.passed else 1


if __name__ == "__main__":
    run(main)
