"""`python -m jaxdist.bench gpu`: on one GPU, numerics, the step of some models and what it consists of, and what else
it could be: unrolled, recomputed, compiled with other flags, or written in PyTorch. Each part is a process."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxdist.bench.step import JSON
from jaxdist.cluster import gpus
from jaxdist.cluster.process_env import check_alone
from jaxdist.config import RequestError, nearest
from jaxdist.doctor.software import FRACTIONS, refused
from jaxdist.files import write_whole
from jaxdist.request import Extra, arguments, check_output, load
from jaxdist.values import Count, CountOrZero, FileName, RowsOrZero, WholeSeconds

DESCRIPTION = (
    "On one GPU: check the fast forms against plain float32, measure the step of some Llamas and what it consists of, "
    "and compare the first of them unrolled, with recomputation, with other compiler flags, and in PyTorch."
)
PARTS = ("numerics", "models", "torch", "layers", "remat", "flags")

MODELS = Extra("models", "llama_1b-128,llama_3b,llama_1b", "Shipped configs or TOML files; only the first is compared.")
WANTED = Extra("parts", ",".join(PARTS), "What to do, in the order of its importance.")
ROWS = Extra("rows", 0, "Rows of a step; 0: as many as the device holds, at most 16.", RowsOrZero)
WARMUP = Extra("warmup", 3, "Steps before a measurement.", CountOrZero)
REPEATS = Extra("repeats", 10, "Steps that are measured, each one waited for.", Count)
SECONDS = Extra(
    "seconds", 460, "When to end: what has not begun by then is left out, and what runs is ended.", WholeSeconds
)
OUT = Extra(
    "out", "", "Write the result into this JSON file, after every part, and the tables beside it as .txt.", FileName
)

SHAPES = {"llama_1b-128": ("llama_1b", {"model.heads": "16"})}
"""By name: the 1B with heads of 128, of which flash attention makes more than of the published 64."""

ALIKE = {"mesh": "1x1x1", "model.remat": "none", "train.accumulation": "1"}
"""How every model is measured, if not told otherwise."""

REMATS = ("dots", "block")

FLAGS = {
    "latency hiding scheduler": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "no Triton products": "--xla_gpu_enable_triton_gemm=false",
    "no recomputation by XLA": "--xla_disable_hlo_passes=rematerialization",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
}
"""Compiler flags that recipes of others set, each alone."""

PART_SECONDS = 200
"""The most that a part may take."""

LEAST_SECONDS = 20
"""Fewer are left for nothing."""


def main(argv: list[str] | None = None) -> int:
    check_alone("bench gpu")
    extras = [JSON, MODELS, WANTED, ROWS, WARMUP, REPEATS, SECONDS, OUT]
    asked = arguments(argv, "bench gpu", DESCRIPTION, positional=None, extras=extras, knobs=[])
    options = asked.extras
    parts, models = options["parts"].split(","), options["models"].split(",")
    if wrong := [part for part in parts if part not in PARTS]:
        raise RequestError(f"--parts: there is no part '{wrong[0]}'; {nearest(wrong[0], PARTS)}")
    cases = {name: _case(name) for name in models}
    if options["out"]:
        check_out(Path(options["out"]))
    bench = Bench(options, shlex.join(["python", "-m", "jaxdist.bench", "gpu", *(argv or ())]))
    bench.measure(parts, cases)
    return bench.end()


def check_out(path: Path) -> None:
    """Raise `RequestError` where the result, or the tables beside it, could not be written to `path`."""
    check_output("--out", path, "gpu.json")
    if path.suffix != ".json":
        raise RequestError(f"--out '{path}' is no JSON file; name it {path.stem}.json")
    check_output("--out", path.with_suffix(".txt"), "gpu.txt")


def _case(name: str) -> tuple[str, dict[str, str]]:
    """(CONFIG, options) of a model. Raises `RequestError` where there is none."""
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
    """The parts, one process after the other, and what has been found."""

    def __init__(self, options: dict[str, Any], command: str):
        self.options, self.began = options, time.monotonic()
        self.found: dict[str, Any] = {
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": command,
            "python": sys.version.split()[0],
            "driver": _driver(),
            "environment": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("XLA_", "JAX_"))},
            "seconds": 0.0,
            "seconds_allowed": options["seconds"],
            "device": None,
            "models": [],
            "torch": None,
            "variants": [],
            "notes": [],
            "problems": [],
        }

    def measure(self, parts: list[str], cases: dict[str, tuple[str, dict[str, str]]]) -> None:
        """In the order of importance; models after the first come behind what tells of the first."""
        first, *others = cases
        if "numerics" in parts:
            self._device()
        base = self._model(first, *cases[first]) if set(parts) - {"numerics"} else None
        if "torch" in parts and base:
            self._torch(base)
        if "layers" in parts and base:
            self._variant("unrolled layers", base, unroll=True)
        for name in others[:1] if "models" in parts else ():
            self._model(name, *cases[name])
        for remat in REMATS if "remat" in parts and base else ():
            self._variant(f"remat {remat}", base, {"model.remat": remat})
        for name, flags in FLAGS.items() if "flags" in parts and base else ():
            if refused(flags):
                self.found["notes"].append(f"{flags} is unknown to this jaxlib, and left out")
            else:
                self._variant(name, base, flags=flags)
        for name in others[1:] if "models" in parts else ():
            self._model(name, *cases[name])

    def _device(self) -> None:
        from jaxdist.bench.gpu_text import off

        self.found["device"] = found = self._jax("numerics", {"part": "device"})
        for one in found["numerics"] if found else ():
            if not one["fine"]:
                self._problem(
                    f"numerics: {one['what']} is off by {off(one['error'])} of its largest value from plain float32, "
                    f"where {found['dtype']} explains {off(one['bound'])}"
                )

    def _model(self, name: str, config: str, options: dict[str, str]) -> dict[str, Any] | None:
        found = self._step(name, config, options, self.options["rows"], traced=3)
        if found:
            case = {"name": name, "config": config, "options": options}
            self.found["models"].append(case | found)
            if problem := found.get("trace_problem"):
                self._problem(f"{name}: the parts of the step are not told: {problem}")
        return found and self.found["models"][-1]

    def _variant(
        self, name: str, base: dict[str, Any], more: dict[str, str] | None = None, unroll: bool = False, flags: str = ""
    ) -> None:
        """The first model with one thing changed, and fewer steps."""
        options, given = base["options"] | (more or {}), " ".join(filter(None, [os.environ.get("XLA_FLAGS"), flags]))
        environment = {"XLA_FLAGS": given} if flags else {}
        found = self._step(name, base["config"], options, base["rows"], unroll, 0, environment)
        if found:
            self.found["variants"].append({"name": name, "options": options, "flags": flags} | found)

    def _step(
        self,
        name: str,
        config: str,
        options: dict[str, str],
        rows: int,
        unroll: bool = False,
        traced: int = 0,
        environment: dict[str, str] | None = None,
    ) -> dict[str, Any] | None:
        repeats = self.options["repeats"] if traced else max(1, self.options["repeats"] // 2)
        asked = dict(config=config, overrides=options, rows=rows, unroll=unroll, traced=traced)
        asked |= dict(part="step", warmup=self.options["warmup"], repeats=repeats)
        return self._jax(name, asked, environment)

    def _torch(self, base: dict[str, Any]) -> None:
        """The same model, with compilation, or else without."""
        if not base["torch"]:
            self.found["notes"].append(
                f"torch: {base['name']} is no tied Llama with AdamW, and has no counterpart there"
            )
            return
        if importlib.util.find_spec("torch") is None:
            self.found["notes"].append("torch is not installed, and so not compared: pip install 'jaxdist[torch]'")
            return
        counts = dict(warmup=self.options["warmup"], repeats=self.options["repeats"])
        asked = dict(**base["torch"], rows=base["rows"], weights="", **counts)
        command = [sys.executable, "-P", str(Path(__file__).with_name("torch_llama.py"))]
        for compiled in (False,) if base["device"] == "cpu" else (True, False):
            if found := self._child("torch", command, asked | {"compile": compiled}):
                self.found["torch"] = found
                return

    def _jax(self, name: str, asked: dict[str, Any], environment: dict[str, str] | None = None) -> dict | None:
        return self._child(name, [sys.executable, "-P", "-m", "jaxdist.bench.gpu_child"], asked, environment)

    def _child(
        self, name: str, command: list[str], asked: dict[str, Any], environment: dict[str, str] | None = None
    ) -> dict[str, Any] | None:
        """What a process answers; None, and a sentence among the problems, where it does not."""
        spent = time.monotonic() - self.began
        limit = min(PART_SECONDS, self.options["seconds"] - spent)
        if limit < LEAST_SECONDS:
            self.found["notes"].append(
                f"{name}: left out, {spent:.0f} s are spent; give --seconds more, or fewer --parts"
            )
            return None
        print(f"[{spent:4.0f} s] {name}", file=sys.stderr, flush=True)
        self._write()
        value, problem = _answer(command, asked, {**_environment(), **(environment or {})}, limit)
        if problem:
            self._problem(f"{name}: {problem}")
        self.found["seconds"] = round(time.monotonic() - self.began, 1)
        return value

    def _problem(self, text: str) -> None:
        self.found["problems"].append(text)
        print(f"problem: {text}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        from jaxdist.bench.gpu_text import lines

        if self.options["out"]:
            path = Path(self.options["out"])
            write_whole(path, json.dumps(self.found, indent=1) + "\n")
            write_whole(path.with_suffix(".txt"), "\n".join(lines(self.found)) + "\n")

    def end(self) -> int:
        """Tell all of it; 1 where anything is missing or wrong."""
        from jaxdist.bench.gpu_text import lines

        self._write()
        print(json.dumps(self.found) if self.options["json"] else "\n".join(lines(self.found)), flush=True)
        return 1 if self.found["problems"] else 0


def _answer(
    command: list[str], asked: dict[str, Any], environment: dict[str, str], limit: float
) -> tuple[dict[str, Any] | None, str]:
    """(what the process answers, what is wrong); one of them is empty."""
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        question, answer, said = (Path(folder) / name for name in ("question", "answer", "said"))
        question.write_text(json.dumps(asked))
        with said.open("wb") as log:
            process = subprocess.Popen(
                [*command, str(question), str(answer)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                return None, f"ended after {limit:.0f} s"
            finally:
                _kill(process)
        if answer.exists():
            told = json.loads(answer.read_text())
            return told.get("value"), told.get("problem", "")
        how = f"ended with {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        return None, f"its process {how}; it said last: {_last_words(said.read_text(errors='replace'))}"


def _kill(process: subprocess.Popen) -> None:
    """With all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(said: str) -> str:
    """The error that a traceback ends with, or else the last line."""
    texts = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in texts if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    return (errors or texts or ["nothing"])[-1][:300]


def _environment() -> dict[str, str]:
    """Ours, for one GPU of which most of the memory is for the taking, and with the modules that we can import."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    own = dict(PYTHONPATH=paths)
    if len(there := gpus.visible()) > 1:
        own["CUDA_VISIBLE_DEVICES"] = there[0]
    if not any(os.environ.get(name) for name in FRACTIONS):
        own[FRACTIONS[0]] = "0.92"
    return os.environ | own


def _driver() -> dict[str, str] | None:
    """What NVIDIA's own tool tells of the first GPU."""
    names = ("name", "driver_version", "power.limit", "clocks.max.sm", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(names, map(str.strip, told.splitlines()[0].split(",")), strict=False))
