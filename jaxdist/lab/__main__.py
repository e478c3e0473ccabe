"""`python -m jaxdist.lab NAME`: run a lab, or check a claim of the lecture; `--all`: check all; else list them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Protocol, get_args

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import PipelineConfig, RequestError, nearest
from jaxdist.config.values import Count, CountOrZero, FileName, MicroBatches, Stages
from jaxdist.files import write_whole
from jaxdist.lab.claims import DEVICES, Claim, claims, measure, topics
from jaxdist.request import JSON, Extra, arguments, check_output, check_picture, run

LABS = {
    "all-reduce": "algorithms of all-reduce: their messages counted, and how they grow with the number of nodes",
    "fsdp-walkthrough": "one step of fully sharded training, phase by phase: what moves and what every device holds",
    "model-parallel": "one layer on each of two devices: the same result, and a device that always waits",
    "schedules": "pipeline schedules drawn, and their bubble and memory beside the formulas",
}
"""Name -> what the lab shows. The module of that name has `measure`, which takes its options and returns a `Result`."""

SCHEDULES = get_args(PipelineConfig.model_fields["schedule"].annotation)

OPTIONS = {
    "all-reduce": (
        Extra("devices", 8, "Nodes, K.", Count),
        Extra("algorithm", "all", "One of naive, direct, ring, halving, doubling, tree, parameter-server, or all."),
        Extra("picture", "", "Draw the steps on four nodes, and the cost over K, into this PNG file.", FileName),
    ),
    "schedules": (
        Extra("schedule", "all", f"One of {', '.join(SCHEDULES)}, or all."),
        Extra("stages", 4, "Stages, S.", Stages),
        Extra("microbatches", 8, "Micro-batches, M.", MicroBatches),
        Extra("virtual_stages", 0, "Chunks on each rank, v; 0: 2 for interleaved, 1 for the others.", CountOrZero),
        Extra("picture", "", "Draw the timelines into this PNG file.", FileName),
    ),
}
"""Name -> options of the lab besides --json. They stand here, so that --help imports no lab."""

CLAIM_OPTIONS = [JSON, Extra("picture", "", "Draw the measurement into this PNG file.", FileName)]
WIDTH = 23
"""Columns of the name of a claim."""

LABEL = 11
"""Columns of its label."""

OUTPUT = "lab.html"
ALL_OPTIONS = [JSON, Extra("output", OUTPUT, "Write the page with all claims and pictures to this file.", FileName)]

EXERCISE = "exercise"
"""The first word of the command that runs a student's function."""

EXERCISES = {
    "ddp-average": "what every worker holds after the all-reduce of data parallelism",
    "1f1b-order": "the order of a stage's units in 1F1B",
    "zero-shards": "the bytes of model states on a device, by ZeRO stage",
    "column-row": "what each device adds to a block of two split matmuls",
    "place": "where a device stands on a mesh of data x model x pipeline",
    "top-k": "the largest elements of a gradient, with error feedback",
}
"""Name -> what a function of the reader's own computes. They stand here, so that the list imports no lab."""

USAGE = """usage: python -m jaxdist.lab NAME [--json] [--help]
       python -m jaxdist.lab exercise NAME FILE [--json]
       python -m jaxdist.lab --all [--output FILE.html] [--json]"""


class Result(Protocol):
    """What a lab has measured."""

    passed: bool
    """Whether everything that the lab claims was observed."""

    def json(self) -> dict[str, Any]:
        """Return the result as one JSON object."""
        ...

    def lines(self) -> list[str]:
        """Return the result as lines of text."""
        ...


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0 if what was claimed was observed, else 1."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print("\n".join(listing()))
        return 0
    if "--all" in argv:
        return run_all([word for word in argv if word != "--all"])
    name, *rest = argv
    if name == EXERCISE:
        return run_exercise(rest)
    if name in LABS:
        return run_lab(name, rest)
    if name in claims():
        return run_claim(claims()[name], rest)
    raise RequestError(f"there is no lab '{name}'; {nearest(name, [EXERCISE, *LABS, *claims()])}")


def names() -> dict[str, str]:
    """Return the first words that the command takes, each with what it does."""
    described = {claim.id: claim.claim for claim in claims().values()}
    return {
        **LABS,
        **described,
        EXERCISE: "run a function of your own against ours",
        "--all": "measure every claim and write a page",
    }


def listing() -> list[str]:
    """Return the list of labs, then of claims by topic, without running any."""
    lines = [USAGE, "", "labs:"]
    for name, about in LABS.items():
        lines.append(f"  {name:<{WIDTH}}{about}")
    lines += ["", "exercises:"]
    for name, about in EXERCISES.items():
        lines.append(f"  {name:<{WIDTH}}{about}")
    for topic, group in topics():
        lines += ["", f"claims, {topic}:"]
        for claim in group:
            lines.append(f"  {claim.id:<{WIDTH}}{claim.label:<{LABEL}}{claim.claim}")
    return lines


def run_lab(name: str, argv: list[str]) -> int:
    """Run a lab and print its result; returns the exit code."""
    options = [JSON, *OPTIONS.get(name, ())]
    request = arguments(argv, f"lab {name}", f"Shows {LABS[name]}.", positional=None, extras=options, knobs=())
    check_alone("lab")
    chosen = dict(request.extras)
    as_json = chosen.pop("json")
    check_picture(chosen.get("picture", ""), f"{name}.png")
    # Imported late, so that mistakes in the options are reported before JAX starts.
    lab = importlib.import_module(f"jaxdist.lab.{name.replace('-', '_')}")
    result: Result = lab.measure(**chosen)
    _print(result, as_json)
    return 0 if result.passed else 1


def run_exercise(argv: list[str]) -> int:
    """Run a student's function against ours and print the result; returns the exit code."""
    words = argv[: next((at for at, word in enumerate(argv) if word.startswith("-")), len(argv))]
    about = "Runs a function of your own against ours: exercise NAME FILE. The names are " + ", ".join(EXERCISES) + "."
    request = arguments(argv[len(words) :], f"lab {EXERCISE}", about, positional=None, extras=[JSON], knobs=())
    if len(words) != 2:
        raise RequestError(f"write exercise NAME FILE; the names are {', '.join(EXERCISES)}")
    check_alone("lab")
    # Imported late, so that mistakes in the options are reported before JAX starts.
    from jaxdist.lab.exercises import check

    _split_cpu()
    result = check(*words)
    _print(result, request.extras["json"])
    return 0 if result.passed else 1


def run_claim(claim: Claim, argv: list[str]) -> int:
    """Measure a claim and print the report; returns the exit code."""
    about = f"Measures a claim of the lecture: {claim.claim}."
    request = arguments(argv, f"lab {claim.id}", about, positional=None, extras=CLAIM_OPTIONS, knobs=())
    picture = request.extras["picture"]
    check_picture(picture, f"{claim.id}.png")
    check_alone("lab")
    _split_cpu()
    report = measure(claim)
    if picture:
        if report.outcome is None or report.outcome.picture is None:
            raise RequestError(f"{claim.id} has no picture; leave --picture out")
        report.outcome.picture(Path(picture))
    _print(report, request.extras["json"])
    return 0 if report.passed else 1


def run_all(argv: list[str]) -> int:
    """Measure every claim and write a page; returns 0 if all have passed. A claim that is not checked has not."""
    about = "Measures every claim of the lecture, and writes one HTML page, which needs no network."
    request = arguments(argv, "lab --all", about, positional=None, extras=ALL_OPTIONS, knobs=())
    output = request.extras["output"] or OUTPUT
    as_json = request.extras["json"]
    check_output("--output", output, OUTPUT)
    check_alone("lab")

    from jaxdist.lab.page import page, summary

    _split_cpu()
    reports = []
    for _, group in topics():
        for claim in group:
            _tell_under_way(f"{len(reports) + 1} of {len(claims())}: {claim.id}")
            report = measure(claim)
            reports.append(report)
            _tell_under_way("")
            # All claims take minutes, so print each as soon as it is measured.
            if not as_json:
                print(f"{report.status:<13}{claim.label:<{LABEL}}{claim.id:<{WIDTH}}{report.value}", flush=True)
    write_whole(Path(output), page(reports))
    if as_json:
        print(json.dumps({"claims": [report.json() for report in reports]}))
    else:
        print(f"\n{summary(reports)}: {output}")
    return 0 if all(report.passed for report in reports) else 1


def _tell_under_way(what: str) -> None:
    """Show on a terminal what is being measured, in place of what stood there; a pipe or a file gets none of it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)


def _print(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.json()))
    else:
        print("\n".join(result.lines()))


def _split_cpu() -> None:
    """Split the CPU for all claims, before one of them asks JAX for fewer devices."""
    from jaxdist.lab.phases import cpu_mesh

    cpu_mesh(f"{DEVICES}x1x1")


if __name__ == "__main__":
    run(main)
