"""`python -m jaxdist.plan [CONFIG] --devices 64 --cluster h100-ndr`: which mesh, before it is paid for."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import RequestError
from jaxdist.config.values import MOST_DEVICES, Devices, FileName, Suggested
from jaxdist.files import write_whole
from jaxdist.mesh import crossing, fill, parse_mesh
from jaxdist.planning.hardware import PRESETS
from jaxdist.request import DEFAULT, Extra, arguments, check_output, check_picture, load, run, to_toml
from jaxdist.request.numbers import as_list, numbers
from jaxdist.weights.named import check_described

if TYPE_CHECKING:
    from jaxdist.planning.search.estimate import Estimate
    from jaxdist.planning.search.plan import Plan

DESCRIPTION = (
    "Rank every way to split the training of a model over the devices of a cluster, by predicted time and memory. "
    "Nothing is run or compiled, and the devices need not exist."
)
Counts = Annotated[str, AfterValidator(numbers("numbers of devices", 1, MOST_DEVICES, "16,32,64"))]
ClusterName = Annotated[FileName, Suggested(PRESETS)]

KNOBS = ("precision", "init_from", "model", "optimizer", "train.global_batch_size", *crossing.KNOBS)
"""The knobs that a plan reads. What crosses the replicas changes the loss: a search takes it as given."""

EXTRAS = [
    Extra("devices", 8, "Number of devices.", Devices),
    Extra("cluster", "h100-ndr", "A cluster that jaxdist knows, or a TOML file that describes one.", ClusterName),
    Extra("why_not", "", "Explain why this mesh, such as 64x1x1, is not the first."),
    Extra("why", False, "Show the formula and the transfers behind each figure of the first."),
    Extra("trade_off", False, "Show what each axis alone would send, and how long devices would wait."),
    Extra("compare", "", "Also plan for these numbers of devices, such as 16,32,64: throughput, efficiency.", Counts),
    Extra(
        "picture", "", "Plot time, memory and --compare into this PNG file, a pipeline's timeline beside it.", FileName
    ),
    Extra("save", "", "Write the first as a configuration for train into this TOML file.", FileName),
    Extra("json", False, "Print only one JSON object, which includes the answers of --why and --trade-off."),
]


def main(argv: list[str] | None = None) -> int:
    """Search for a plan, and print, plot or save it. Returns the exit code."""
    request = arguments(argv, "plan", DESCRIPTION, extras=EXTRAS, knobs=KNOBS)
    check_alone("plan")
    request.tell_unused(processes=1)
    check_described(request.config.init_from)
    extras = request.extras
    if extras["picture"]:
        check_picture(extras["picture"], "plan.png")
        check_output("picture", timeline_beside(Path(extras["picture"])), "plan.png")
    check_output("--save", extras["save"], "plan.toml")

    # These import jax, which takes seconds: wrong options are reported before.
    from jaxdist.planning.clusters import cluster
    from jaxdist.planning.search import slow_link, text
    from jaxdist.planning.search.plan import search
    from jaxdist.planning.search.questions import scaling, why_not

    if extras["why_not"]:
        check_why_not(extras["why_not"], extras["devices"])
    where = cluster(extras["cluster"])
    name = request.positional or str(request.config.init_from or DEFAULT)
    base = load(name, {}, knobs=KNOBS)
    plan = search(request.config, extras["devices"], where)
    slow_link.check_replicas(plan)
    more = []
    if extras["compare"]:
        more = scaling(request.config, as_list(extras["compare"]), where)
    reason = ""
    if extras["why_not"]:
        reason = why_not(plan, extras["why_not"])

    if extras["json"]:
        print(json.dumps(text.json(plan, base, more, reason)))
    else:
        sections: list[Iterable[str]] = []
        if reason:
            sections.append([reason])
        if extras["why"]:
            sections.append(text.why(plan))
        if extras["trade_off"]:
            sections.append(text.trade_off(plan))
        if more:
            sections.append(text.compared(more))
        changed = slow_link.sentence(plan)
        if not sections:
            sections.append(text.lines(plan, name, base))
        elif changed:
            sections.append([changed])
        print("\n\n".join("\n".join(lines) for lines in sections))
    if extras["picture"]:
        _draw(plan, more, Path(extras["picture"]))
    if extras["save"]:
        write_whole(Path(extras["save"]), to_toml(plan.ranked[0].config))
    return 0


def check_why_not(mesh: str, devices: int) -> None:
    """Raise `RequestError` where `--why-not` is no mesh of all devices: before the search, which takes seconds."""
    try:
        fill(parse_mesh(mesh), devices)
    except RequestError as error:
        raise RequestError(*(f"--why-not: {problem}" for problem in error.problems)) from None


def _draw(plan: Plan, more: list[tuple[int, Estimate | str]], path: Path) -> None:
    from jaxdist.planning.search.picture import draw, draw_timeline

    draw(plan, more, path)
    draw_timeline(plan.ranked[0], timeline_beside(path))


def timeline_beside(path: Path) -> Path:
    """Return where the timeline of a pipeline is drawn, beside the picture of the plan."""
    return path.with_stem(f"{path.stem}-timeline")


if __name__ == "__main__":
    run(main)
