"""`python -m jaxdist.bench gpu`: measure the step of some models on one GPU, and try what jaxdist does there.

The parts run in the order of what is worth most (`gpu_order`), each in a process of its own, so that one that fails
costs no other. The result is written after every part; the same command goes on with the parts that are missing.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.bench import gpu_process
from jaxdist.bench.gpu_order import ALIKE, DEVICE, GROUPS, MODEL, RUN, SHAPES, TORCH, VARIANT, Part, in_order
from jaxdist.cluster import gpus
from jaxdist.cluster.process_env import check_alone
from jaxdist.config import RequestError, nearest
from jaxdist.config.values import Count, CountOrZero, FileName, RowsOrZero, WholeSeconds
from jaxdist.doctor.software import FRACTIONS, refused
from jaxdist.files import write_whole
from jaxdist.files.json_files import read_json
from jaxdist.request import JSON, Extra, arguments, check_output, load

DESCRIPTION = (
    "On one GPU: measure the step of some Llamas and its parts, compare the first of them in PyTorch, with other "
    "options and with other compiler flags, check the fast kernels against plain float32, and train, kill, resume, "
    "evaluate and generate. With the same --out, the same command goes on with the parts that are missing."
)
MODELS = Extra("models", "llama_1b-128,llama_3b,llama_1b", "Shipped configs or TOML files; only the first is compared.")
WANTED = Extra("parts", ",".join(GROUPS), "Which parts to run; the most important run first.")
ROWS = Extra("rows", 0, "Rows of a step; 0: as many as the device holds, at most 16.", RowsOrZero)
WARMUP = Extra("warmup", 3, "Steps before a measurement.", CountOrZero)
REPEATS = Extra("repeats", 10, "Steps that are measured, each one waited for.", Count)
STEPS = Extra("steps", 400, "Steps of the run that is killed and resumed.", Count)
SECONDS = Extra(
    "seconds", 1500, "Seconds after which a part that runs is ended and the others are skipped.", WholeSeconds
)
OUT = Extra("out", "", "Write the result into this JSON file after every part, and tables beside it as .md.", FileName)

TORCH_FILE = Path(__file__).parents[2] / "benchmarks" / "torch_llama.py"
"""The same step in PyTorch, which belongs to the benchmarks of the repository and not to the package."""

LEAST_SECONDS = 20
"""A part is not started with fewer seconds left."""

ATTEMPTS = 2
"""How often a part is tried that fails, or in which the bench itself is ended: again only after all others."""

ENDED = ("done", "refused")
"""States of a part that is not tried again."""

OWN = ("out", "seconds", "json")
"""Options that may differ where a result goes on: they do not change what is measured."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    extras = [JSON, MODELS, WANTED, ROWS, WARMUP, REPEATS, STEPS, SECONDS, OUT]
    options = arguments(argv, "bench gpu", DESCRIPTION, positional=None, extras=extras, knobs=[]).extras
    check_alone("bench gpu")
    groups = options["parts"].split(",")
    for group in groups:
        if group not in GROUPS:
            raise RequestError(f"--parts: there is no part '{group}'; {nearest(group, GROUPS)}")
    cases = {name: _case(name) for name in options["models"].split(",")}
    before = None
    if options["out"]:
        check_out(Path(options["out"]))
        before = earlier(Path(options["out"]), options)
    # The command is stored with the result, so that it can be repeated.
    bench = Bench(options, shlex.join(["python", "-m", "jaxdist.bench", "gpu", *(argv or ())]), before)
    bench.measure(groups, cases)
    return bench.end()


def earlier(path: Path, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the result that `path` holds of the same request; None if there is no file.

    Raises `RequestError` if it is the result of another request, or none.
    """
    if not path.exists():
        return None
    found = read_json(path)
    asked = found.get("asked")
    if not isinstance(asked, dict) or not isinstance(found.get("parts"), list):
        raise RequestError(f"--out '{path}' exists and is no result of bench gpu; name another file")
    same = _asked(options)
    changed = [name for name in same if asked.get(name) != same[name]]
    if changed:
        named = ", ".join(f"--{name}" for name in changed)
        raise RequestError(f"--out '{path}' holds a result with other {named}; ask for the same, or name another file")
    return found


def _asked(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in OWN}


def check_out(path: Path) -> None:
    """Raise `RequestError` if the result, or the tables beside it, cannot be written to `path`."""
    check_output("--out", path, "gpu.json")
    if path.suffix != ".json":
        raise RequestError(f"--out '{path}' is no JSON file; name it {path.stem}.json")
    check_output("--out", path.with_suffix(".md"), "gpu.md")


def _case(name: str) -> tuple[str, dict[str, str]]:
    """Return CONFIG and options of a model; raises `RequestError` if there is none."""
    config, options = SHAPES.get(name, (name, {}))
    options = {**ALIKE, **options}
    try:
        loaded = load(config, {**options, "train.global_batch_size": "1"})
    except RequestError as error:
        raise RequestError(*(f"--models: {problem}" for problem in error.problems)) from None
    if loaded.model.images:
        raise RequestError(f"--models: {name} classifies images; name models of text")
    return config, options


class Bench:
    """Runs the parts, one process after the other, and collects the results."""

    def __init__(self, options: dict[str, Any], command: str, before: dict[str, Any] | None):
        """`before` is an earlier result, which is completed."""
        self.options = options
        self.began = time.monotonic()
        self.found: dict[str, Any] = before or {
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "asked": _asked(options),
            "commands": [],
            "python": sys.version.split()[0],
            "driver": _driver(),
            "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("XLA_", "JAX_"))},
            "seconds": 0.0,
            "attention": "auto",
            "parts": [],
            "notes": [],
        }
        self.found["commands"].append(command)
        # What an earlier command left out may be done now.
        self.found["notes"] = []
        self.spent_before = self.found["seconds"]
        self.folder = Path(tempfile.mkdtemp(prefix="jaxdist-gpu-"))
        self.keeps = False
        if options["out"]:
            # Beside the result, so that programs and runs are there when the command goes on.
            self.folder = Path(options["out"]).absolute().with_suffix(".work")
            self.folder.mkdir(exist_ok=True)
            self.keeps = True

    def measure(self, groups: Sequence[str], cases: Mapping[str, tuple[str, dict[str, str]]]) -> None:
        """Run the parts of these groups in the order of their worth, and those that failed again at the end."""
        parts = [part for part in in_order(cases, self.options["steps"]) if part.group in groups]
        for attempt in range(ATTEMPTS):
            for part in parts:
                record = self._record(part)
                # One that was running when the bench was ended may have ended it.
                if record["state"] not in ENDED and record["attempts"] == attempt and self._wanted(part):
                    self._take(part, record)
        self.found["parts"] = [record for record in self.found["parts"] if record["attempts"]]

    def _record(self, part: Part) -> dict[str, Any]:
        """Return what is known of a part."""
        for record in self.found["parts"]:
            if record["name"] == part.name:
                return record
        record = {"name": part.name, "kind": part.kind, "state": "new", "attempts": 0}
        record |= {"seconds": 0.0, "problem": "", "sensors": None, "value": None}
        self.found["parts"].append(record)
        return record

    def _take(self, part: Part, record: dict[str, Any]) -> None:
        """Run a part, and write what it finds."""
        spent = time.monotonic() - self.began
        limit = min(part.seconds, self.options["seconds"] - spent)
        if limit < LEAST_SECONDS:
            if not record["attempts"]:
                self._note(f"{part.name}: left out after {spent:.0f} s; raise --seconds, or give fewer --parts")
            return
        print(f"[{spent:4.0f} s] {part.name}", file=sys.stderr, flush=True)
        before = dict(record)
        record |= {"state": "running", "attempts": record["attempts"] + 1}
        # A bench that is killed in a part leaves the results so far, and that the part was running.
        self._write()
        began = time.monotonic()
        ended = self._ended(part, limit)
        problems = [ended.problem, *self._found_wrong(part, ended.value)]
        state = "done"
        if ended.problem:
            state = "refused" if ended.refused else "failed"
        record |= {"state": state, "value": ended.value, "sensors": ended.sensors}
        record |= {"seconds": round(time.monotonic() - began, 1), "problem": "; ".join(filter(None, problems))}
        if ended.problem and _length(before["value"]) > _length(ended.value):
            # A second attempt, which may have less time, costs nothing that the first has found.
            record |= {**before, "attempts": record["attempts"], "state": "failed"}
        if record["problem"]:
            print(f"problem: {part.name}: {record['problem']}", file=sys.stderr, flush=True)
        self._write()

    def _ended(self, part: Part, limit: float) -> gpu_process.Ended:
        """Run the process of a part; again with attention in blocks if it fails in cuDNN, and from then on always.

        A model that hangs, or is killed by a signal, does not say where: cuDNN is tried first.
        """
        ended = self._run(part, limit)
        in_cudnn = "cudnn" in ended.problem.lower() or (part.kind == MODEL and ended.killed)
        left = min(part.seconds, self.options["seconds"] - (time.monotonic() - self.began))
        if part.kind == TORCH or self.found["attention"] != "auto" or left < LEAST_SECONDS:
            return ended
        if ended.value is not None or not in_cudnn:
            return ended
        self.found["attention"] = "blocks"
        again = self._run(part, left)
        if again.value is None:
            self.found["attention"] = "auto"
            return ended
        self._note(f"from {part.name} on, attention runs in blocks, because with cuDNN's it failed: {ended.problem}")
        return again

    def _run(self, part: Part, limit: float) -> gpu_process.Ended:
        if part.kind == TORCH:
            # -P keeps the folder of the script out of the module search path, where our modules could hide others.
            command = [sys.executable, "-P", str(TORCH_FILE)]
        else:
            command = [sys.executable, "-P", "-m", "jaxdist.bench.gpu_child"]
        try:
            return gpu_process.run(command, self._question(part), self._environment(part), limit)
        except OSError as error:
            # Where the disk is full, what is known must not be lost with the process that knows it.
            return gpu_process.Ended(None, f"{type(error).__name__}: {error}")

    def _question(self, part: Part) -> dict[str, Any]:
        """Return what the process of a part is asked."""
        options = self.options
        base = self._value_of(MODEL) or {}
        forced = {}
        if self.found["attention"] != "auto":
            forced = {"model.attention": self.found["attention"]}
        if part.kind == TORCH:
            asked = {"rows": base["rows"], "weights": "", "warmup": options["warmup"], "repeats": options["repeats"]}
            return base["torch"] | asked | part.question
        if part.kind == RUN:
            question = {"folder": str(self.folder / part.name), **part.question}
            if "overrides" in question:
                del question["folder"]
                question["overrides"] = {**question["overrides"], **forced}
            if "options" in question:
                question["options"] = [*question["options"], *(f"--{name}={value}" for name, value in forced.items())]
            if question["part"] in ("evaluate", "generate"):
                question["folder"] = str(self.folder / "train")
            return question
        if part.kind == DEVICE:
            return dict(part.question)
        question = {"part": "step", "rows": options["rows"], "warmup": options["warmup"]}
        question |= {"repeats": options["repeats"], "traced": 3}
        if part.kind == VARIANT:
            # With the rows of the first model, so that the two compare; fewer steps, and no trace.
            rows = base.get("rows", options["rows"]) * part.times
            question |= {"rows": rows, "repeats": max(1, options["repeats"] // 2), "traced": 0}
        question |= part.question
        return question | {"overrides": {**question["overrides"], **forced}}

    def _wanted(self, part: Part) -> bool:
        """Return whether a part can run here; a note says why not."""
        if part.flags and refused(part.flags):
            self._note(f"{part.flags} is unknown to this jaxlib, and left out")
            return False
        if part.kind != TORCH:
            return True
        base = self._value_of(MODEL)
        if base is None:
            self._note(f"{part.name}: left out, because nothing is known of the first model")
        elif not base["torch"]:
            name = self._first(MODEL)["name"]
            self._note(f"torch: {name} is not a Llama with tied embeddings and AdamW, so it has no counterpart there")
        elif not TORCH_FILE.exists():
            self._note(
                "torch is not compared: benchmarks/torch_llama.py is not part of the installed package; run from a "
                "clone of jaxdist's repository that is installed with pip install -e"
            )
        elif importlib.util.find_spec("torch") is None:
            self._note("torch is not installed, so it is not compared: pip install 'jaxdist[torch]'")
        else:
            on_cpu = base["device"] == "cpu"
            one_runs = any(one["kind"] == TORCH and one["value"] for one in self.found["parts"])
            # On a CPU there is one form of attention; elsewhere the eager form is for where none could be compiled.
            return part.on_cpu if on_cpu else part.question["compile"] or not one_runs
        return False

    def _found_wrong(self, part: Part, value: dict[str, Any] | None) -> list[str]:
        """Return what a part has found to be wrong."""
        from jaxdist.bench.gpu_text import off

        if part.kind == DEVICE and value:
            wrong = [one for one in value["numerics"] if not one["fine"]]
            return [
                f"{one['what']} is off by {off(one['error'])} of its largest value from plain float32, where "
                f"{value['dtype']} explains {off(one['bound'])}"
                for one in wrong
            ]
        if value and value.get("trace_problem"):
            return [f"the parts of the step are not known: {value['trace_problem']}"]
        return []

    def _first(self, kind: str) -> dict[str, Any]:
        return next((one for one in self.found["parts"] if one["kind"] == kind), {})

    def _value_of(self, kind: str) -> Any:
        """Return what the first part of a kind has found; None without it."""
        return self._first(kind).get("value")

    def _environment(self, part: Part) -> dict[str, str]:
        """Return the environment of a part: one cache of programs for all, one GPU, and our module search path."""
        cache = self.folder / "programs"
        own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            own["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            own["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "torch")
        visible = gpus.visible()
        if len(visible) > 1:
            own["CUDA_VISIBLE_DEVICES"] = visible[0]
        if not any(os.environ.get(name) for name in FRACTIONS):
            # Nothing else runs on this GPU, so leave little room.
            own[FRACTIONS[0]] = "0.92"
        if part.flags:
            inherited = os.environ.get("XLA_FLAGS")
            own["XLA_FLAGS"] = f"{inherited} {part.flags}" if inherited else part.flags
        return os.environ | own

    def _note(self, text: str) -> None:
        if text not in self.found["notes"]:
            self.found["notes"].append(text)

    def _write(self) -> None:
        """Write the results so far to --out, and the tables beside it; what cannot be written costs no part."""
        from jaxdist.bench.gpu_text import markdown

        self.found["seconds"] = round(self.spent_before + time.monotonic() - self.began, 1)
        if self.options["out"]:
            path = Path(self.options["out"])
            try:
                write_whole(path, json.dumps(self.found, indent=1) + "\n")
                write_whole(path.with_suffix(".md"), "\n".join(markdown(self.found)) + "\n")
            except Exception as error:
                # It is written again after the next part, and all is printed in the end.
                print(f"problem: --out: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def end(self) -> int:
        """Write and print all results; returns exit code 1 if a part failed, or found something wrong."""
        from jaxdist.bench.gpu_text import lines

        self._write()
        if not self.keeps:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self.options["json"]:
            print(json.dumps(self.found), flush=True)
        else:
            print("\n".join(lines(self.found)), flush=True)
        return 1 if any(one["problem"] or one["state"] == "running" for one in self.found["parts"]) else 0


def _driver() -> dict[str, str] | None:
    """Return what nvidia-smi reports of the GPU that is used; None without it."""
    names = ("name", "driver_version", "power.limit", "clocks.max.sm", "memory.total")
    query = [f"--query-gpu={','.join(names)}", "--format=csv,noheader", f"--id={gpu_process.gpu_of(os.environ)}"]
    try:
        output = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = output.partition("\n")[0].split(",")
    return dict(zip(names, map(str.strip, values), strict=False))


def _length(value: Any) -> int:
    """Return how much a part has found: what it yields later has all that it yielded before."""
    return 0 if value is None else len(json.dumps(value))
