"""`python -m jaxdist.plan [CONFIG] --devices 64 --cluster h100-ndr`: which mesh, before it is paid for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import AfterValidator

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import Config, RequestError
from jaxdist.config.values import MOST_DEVICES, Devices, FileName, NonNegative, Suggested
from jaxdist.files import write_whole
from jaxdist.mesh import crossing, fill, parse_mesh
from jaxdist.planning.hardware import PRESETS
from jaxdist.request import DEFAULT, SHIPPED, Extra, arguments, check_output, check_picture, load, run, to_toml
from jaxdist.request.measured import measured_steps
from jaxdist.request.numbers import as_list, numbers
from jaxdist.request.reading import read
from jaxdist.weights.named import check_described

if TYPE_CHECKING:
    from jaxdist.planning.search.estimate import Estimate
    from jaxdist.planning.search.plan import Plan
    from jaxdist.planning.search.refit import Refit
    from jaxdist.planning.search.sizing_text import Answers, Job

DESCRIPTION = (
    "Rank every way to split the training of a model over the devices of a cluster, by predicted time and memory. "
    "Nothing is run or compiled, and the devices need not exist."
)
Counts = Annotated[str, AfterValidator(numbers("numbers of devices", 1, MOST_DEVICES, "16,32,64"))]
ClusterName = Annotated[FileName, Suggested(PRESETS)]

KNOBS = (
    "precision",
    "init_from",
    "model",
    "optimizer",
    "train.global_batch_size",
    "train.objective",
    *crossing.KNOBS,
)
"""The knobs that a plan reads. What crosses the replicas changes the loss: a search takes it as given."""

EXTRAS = [
    Extra("devices", 8, "Number of devices.", Devices),
    Extra("cluster", "h100-ndr", "A cluster that jaxdist knows, or a TOML file that describes one.", ClusterName),
    Extra("why_not", "", "Explain why this mesh, such as 64x1x1, is not the first."),
    Extra("why", False, "Show the formula and the transfers behind each figure of the first."),
    Extra("trade_off", False, "Show what each axis alone would send, and how long devices would wait."),
    Extra("compare", "", "Also plan for these numbers of devices, such as 16,32,64: time, efficiency, cost.", Counts),
    Extra("tokens", 0.0, "Tokens to train on, such as 2e12; 0: 20 for each parameter.", NonNegative),
    Extra("deadline", 0.0, "Days for these tokens: find the number of devices, in place of --devices.", NonNegative),
    Extra("price", 0.0, "Price of an hour of a device: also show what a run costs.", NonNegative),
    Extra("largest", False, "Plan for the largest shipped model that fits, and trains within --deadline."),
    Extra("spare", False, "Also plan for one host fewer, as after the loss of one."),
    Extra("network", False, "Also plan for slower networks between the hosts."),
    Extra("fit", "", "Fit the cluster to your own steps first: metrics.jsonl of runs, bench step --json.", many=True),
    Extra("fit_out", "", "Write the cluster that --fit has found into this TOML file, for --cluster.", FileName),
    Extra(
        "picture", "", "Plot time, memory and --compare into this PNG file, a pipeline's timeline beside it.", FileName
    ),
    Extra("save", "", "Write the first as a configuration for train into this TOML file.", FileName),
    Extra("json", False, "Print only one JSON object, which includes the answers of --why and --trade-off."),
]


class Found(NamedTuple):
    """A plan, and the answers to what else was asked."""

    plan: Plan
    job: Job
    base: Config
    """The configuration that the job is named for, without options."""
    answers: Answers
    why_not: str
    """Why the mesh of --why-not is not the first; empty where none is named."""
    fitted: Refit | None
    """What --fit has found."""

    def json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        from jaxdist.planning.search import refit, text

        answers = self.answers.json(partial(text.json_or_reason, base=self.base))
        found = text.json(self.plan, self.base, answers, self.why_not)
        return {"fit": refit.as_json(self.fitted) if self.fitted else None, **found}

    def sections(self, extras: Mapping[str, Any]) -> list[Iterable[str]]:
        """Return the answers to the questions in `extras`, each as lines; the whole plan where there are none."""
        from jaxdist.planning.search import refit, slow_link, text
        from jaxdist.planning.search.sizing_text import run_line

        plan = self.plan
        sections: list[Iterable[str]] = []
        if self.why_not:
            sections.append([self.why_not])
        if extras["why"]:
            sections.append(text.why(plan))
        if extras["trade_off"]:
            sections.append(text.trade_off(plan))
        sections += self.answers.sections()
        changed = slow_link.sentence(plan)
        if not sections or self.job.found:
            run = run_line(plan, self.answers.run) if self.answers.run else ""
            sections.append(text.lines(plan, self.job.name, self.base, run, extras["cluster"]))
        elif changed:
            sections.append([changed])
        if self.fitted:
            sections.insert(0, refit.lines(self.fitted))
        return sections


def main(argv: list[str] | None = None) -> int:
    """Search for a plan, and print, plot or save it. Returns the exit code."""
    request = arguments(argv, "plan", DESCRIPTION, extras=EXTRAS, knobs=KNOBS)
    check_alone("plan")
    request.tell_unused(processes=1)
    check_described(request.config.init_from)
    extras = request.extras
    check_files(extras)
    steps = measured_steps(extras["fit"].splitlines()) if extras["fit"] else []

    # These import jax, which takes seconds: wrong options are reported before.
    from jaxdist.planning.clusters import cluster
    from jaxdist.planning.search import refit, slow_link
    from jaxdist.planning.search.plan import search
    from jaxdist.planning.search.questions import why_not
    from jaxdist.planning.search.sizing_text import Answers, Job, Question, find

    if extras["why_not"]:
        check_why_not(extras["why_not"], extras["devices"])
    where = cluster(extras["cluster"])
    fitted = refit.refit(where, steps) if steps else None
    if fitted:
        where = fitted.cluster
    if fitted and extras["fit_out"]:
        write_whole(Path(extras["fit_out"]), refit.file_text(fitted, base_of(extras["cluster"])))
    question = Question(
        **{name: extras[name] for name in ("tokens", "price", "deadline", "spare", "network")},
        compare=as_list(extras["compare"]) if extras["compare"] else (),
    )
    name = request.positional or str(request.config.init_from or DEFAULT)
    models = shipped_models(request.overrides) if extras["largest"] else {}
    job = find(Job(name, request.config, extras["devices"]), question, models, where)
    base = load(job.name, {}, knobs=KNOBS)
    plan = search(job.config, job.devices, where)
    slow_link.check_replicas(plan)
    reason = why_not(plan, extras["why_not"]) if extras["why_not"] else ""
    found = Found(plan, job, base, Answers.of(plan, question, job), reason, fitted)
    if extras["json"]:
        print(json.dumps(found.json()))
    else:
        print("\n\n".join("\n".join(lines) for lines in found.sections(extras)))
    if extras["picture"]:
        _draw(plan, found.answers.compared, Path(extras["picture"]))
    if extras["save"]:
        write_whole(Path(extras["save"]), to_toml(plan.ranked[0].config))
    return 0


def check_files(extras: Mapping[str, Any]) -> None:
    """Raise `RequestError` where a file cannot be written, or has nothing to hold."""
    if extras["picture"]:
        check_picture(extras["picture"], "plan.png")
        check_output("picture", timeline_beside(Path(extras["picture"])), "plan.png")
    check_output("--save", extras["save"], "plan.toml")
    check_output("--fit-out", extras["fit_out"], "here.toml")
    if extras["fit_out"] and not extras["fit"]:
        raise RequestError(
            f"--fit-out '{extras['fit_out']}' writes what --fit has found in steps; name files of steps with --fit, "
            "or leave it out"
        )


def shipped_models(overrides: Mapping[str, str]) -> dict[str, Config]:
    """Return the shipped models of text that are possible with these options, by name."""
    found = {}
    for name in SHIPPED:
        config, problems = read(name, overrides, knobs=KNOBS)
        if not problems and not config.model.images:
            found[name] = config
    return found


def base_of(name: str) -> str:
    """Return a cluster as a file names its base: a file by its whole path."""
    return name if name in PRESETS else str(Path(name).resolve())


def check_why_not(mesh: str, devices: int) -> None:
    """Raise `RequestError` where `--why-not` is no mesh of all devices: before the search, which takes seconds."""
    try:
        fill(parse_mesh(mesh), devices)
    except RequestError as error:
        raise RequestError(*(f"--why-not: {problem}" for problem in error.problems)) from None


def _draw(plan: Plan, more: Sequence[tuple[int, Estimate | str]], path: Path) -> None:
    from jaxdist.planning.search.picture import draw, draw_timeline

    draw(plan, more, path)
    draw_timeline(plan.ranked[0], timeline_beside(path))


def timeline_beside(path: Path) -> Path:
    """Return where the timeline of a pipeline is drawn, beside the picture of the plan."""
    return path.with_stem(f"{path.stem}-timeline")


if __name__ == "__main__":
    run(main)
