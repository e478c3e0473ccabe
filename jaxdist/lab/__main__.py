"""`python -m jaxdist.lab NAME`: run a lab, or one of the lecture's claims; `--all`: every claim; else list them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Protocol

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import RequestError, nearest
from jaxdist.files import write_whole
from jaxdist.lab.claims import DEVICES, Claim, claims, look, topics
from jaxdist.request import Extra, arguments, check_output, check_picture, run
from jaxdist.values import Count, CountOrZero, FileName, MicroBatches, Stages

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
        Extra("picture", "", "Draw their steps on four nodes, and their cost over K, into this PNG file.", FileName),
    ),
    "schedules": (
        Extra("schedule", "all", "Which one: gpipe, 1f1b, interleaved, zb-h1, zb-u, or all of them."),
        Extra("stages", 4, "Stages, S.", Stages),
        Extra("microbatches", 8, "Micro-batches, M.", MicroBatches),
        Extra("virtual_stages", 0, "Chunks on each rank, v; 0: 2 for interleaved, 1 for the others.", CountOrZero),
        Extra("picture", "", "Draw the timelines into this PNG file.", FileName),
    ),
}
"""Name -> its options, where it has more than --json. They are here, so that help imports no lab."""

JSON = Extra("json", False, "Print one JSON object on standard output, and nothing else.")
OF_CLAIM = [JSON, Extra("picture", "", "Draw what there is to see into this PNG file.", FileName)]
OUTPUT = "lab.html"
OF_ALL = [JSON, Extra("output", OUTPUT, "Write the page with all claims and pictures here.", FileName)]

USAGE = """usage: python -m jaxdist.lab NAME [--json] [--help]
       python -m jaxdist.lab --all [--output FILE.html] [--json]"""


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
        print("\n".join(listing()))
        return 0
    if "--all" in argv:
        return run_all([word for word in argv if word != "--all"])
    name, *rest = argv
    if name in LABS:
        return run_lab(name, rest)
    if name in claims():
        return run_claim(claims()[name], rest)
    raise RequestError(f"there is no lab '{name}'; {nearest(name, [*LABS, *claims()])}")


def listing() -> list[str]:
    """The labs, then the claims by topic. Nothing is run."""
    lines = [USAGE, "", "labs:", *(f"  {name:<18}{line}" for name, line in LABS.items())]
    for topic, group in topics():
        lines += ["", f"claims, {topic}:", *(f"  {claim.id:<18}{claim.claim}" for claim in group)]
    return lines


def run_lab(name: str, argv: list[str]) -> int:
    extras = [JSON, *OPTIONS.get(name, ())]
    asked = arguments(argv, f"lab {name}", f"Shows {LABS[name]}.", positional=None, extras=extras, knobs=())
    check_alone("lab")
    chosen = dict(asked.extras)
    as_json = chosen.pop("json")
    check_picture(chosen.get("picture", ""), f"{name}.png")
    result: Result = importlib.import_module(f"jaxdist.lab.{name.replace('-', '_')}").measure(**chosen)
    print(json.dumps(result.json()) if as_json else "\n".join(result.lines()))
    return 0 if result.passed else 1


def run_claim(claim: Claim, argv: list[str]) -> int:
    what = f"Measures a claim of the lecture: {claim.claim}."
    asked = arguments(argv, f"lab {claim.id}", what, positional=None, extras=OF_CLAIM, knobs=())
    picture = asked.extras["picture"]
    check_picture(picture, f"{claim.id}.png")
    check_alone("lab")
    _split_cpu()
    told = look(claim)
    if picture and not (told.outcome and told.outcome.picture):
        raise RequestError(f"{claim.id} has no picture; leave --picture out")
    if picture:
        told.outcome.picture(Path(picture))
    print(json.dumps(told.json()) if asked.extras["json"] else "\n".join(told.lines()))
    return 0 if told.passed else 1


def run_all(argv: list[str]) -> int:
    """Every claim, and a page of all of them. Exits with 0 if all have passed: one that is not checked has not."""
    what = "Measures every claim of the lecture, and writes one HTML page, which needs no network."
    asked = arguments(argv, "lab --all", what, positional=None, extras=OF_ALL, knobs=())
    output, as_json = asked.extras["output"] or OUTPUT, asked.extras["json"]
    check_output("--output", output, OUTPUT)
    check_alone("lab")

    from jaxdist.lab.page import page, summary

    _split_cpu()
    told = []
    for claim in (claim for _, group in topics() for claim in group):
        told.append(look(claim))
        if not as_json:
            print(f"{told[-1].status:<13}{claim.id:<18}{told[-1].value}", flush=True)
    write_whole(Path(output), page(told))
    print(json.dumps({"claims": [one.json() for one in told]}) if as_json else f"\n{summary(told)}: {output}")
    return 0 if all(one.passed for one in told) else 1


def _split_cpu() -> None:
    """Before a claim asks JAX for fewer devices, or for others."""
    from jaxdist.lab.phases import cpu_mesh

    cpu_mesh(f"{DEVICES}x1x1")


if __name__ == "__main__":
    run(main)
