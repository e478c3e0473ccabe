"""`python -m jaxdist.bench gpu`: check numerics on one GPU, and measure the step of some models and its parts.

The first model is also measured with unrolled layers, with recomputation, with other compiler flags, and in PyTorch.
Each part runs in a process of its own, so that running out of memory ends only that part.
"""

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

from jaxdist.cluster import gpus
from jaxdist.cluster.process_env import check_alone
from jaxdist.config import RequestError, nearest
from jaxdist.config.values import Count, CountOrZero, FileName, RowsOrZero, WholeSeconds
from jaxdist.doctor.software import FRACTIONS, refused
from jaxdist.files import write_whole
from jaxdist.process.exit_codes import how_it_ended
from jaxdist.request import JSON, Extra, arguments, check_output, load

DESCRIPTION = (
    "On one GPU: check the fast kernels against plain float32, measure the step of some Llamas and its parts, and "
    "compare the first of them unrolled, with recomputation, with other compiler flags, and in PyTorch."
)
PARTS = ("numerics", "models", "torch", "layers", "remat", "flags")

MODELS = Extra("models", "llama_1b-128,llama_3b,llama_1b", "Shipped configs or TOML files; only the first is compared.")
WANTED = Extra("parts", ",".join(PARTS), "Which parts to run; the most important run first.")
ROWS = Extra("rows", 0, "Rows of a step; 0: as many as the device holds, at most 16.", RowsOrZero)
WARMUP = Extra("warmup", 3, "Steps before a measurement.", CountOrZero)
REPEATS = Extra("repeats", 10, "Steps that are measured, each one waited for.", Count)
SECONDS = Extra(
    "seconds", 460, "Seconds after which a part that runs is ended and the others are skipped.", WholeSeconds
)
OUT = Extra(
    "out", "", "Write the result into this JSON file after every part, and the tables beside it as .txt.", FileName
)

SHAPES = {"llama_1b-128": ("llama_1b", {"model.heads": "16"})}
"""Name -> (CONFIG, options): the 1B with heads of 128, where flash attention is faster than with the published 64."""

ALIKE = {"mesh": "1x1x1", "model.remat": "none", "train.accumulation": "1"}
"""Options of every measurement, unless a measurement overrides them."""

REMATS = ("dots", "block")

FLAGS = {
    "latency hiding scheduler": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "no Triton products": "--xla_gpu_enable_triton_gemm=false",
    "no recomputation by XLA": "--xla_disable_hlo_passes=rematerialization",
    "no command buffers": "--xla_gpu_enable_command_buffer=",
}
"""Compiler flags that published recipes set; each is measured alone."""

TORCH = Path(__file__).parents[2] / "benchmarks" / "torch_llama.py"
"""The same step in PyTorch, which belongs to the benchmarks of the repository and not to the package."""

PART_SECONDS = 200
"""Seconds after which a part is ended."""

LEAST_SECONDS = 20
"""A part is not started with fewer seconds left."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    extras = [JSON, MODELS, WANTED, ROWS, WARMUP, REPEATS, SECONDS, OUT]
    options = arguments(argv, "bench gpu", DESCRIPTION, positional=None, extras=extras, knobs=[]).extras
    check_alone("bench gpu")
    parts = options["parts"].split(",")
    for part in parts:
        if part not in PARTS:
            raise RequestError(f"--parts: there is no part '{part}'; {nearest(part, PARTS)}")
    cases = {name: _case(name) for name in options["models"].split(",")}
    if options["out"]:
        check_out(Path(options["out"]))
    # The command is stored with the result, so that it can be repeated.
    bench = Bench(options, shlex.join(["python", "-m", "jaxdist.bench", "gpu", *(argv or ())]))
    bench.measure(parts, cases)
    return bench.end()


def check_out(path: Path) -> None:
    """Raise `RequestError` if the result, or the tables beside it, cannot be written to `path`."""
    check_output("--out", path, "gpu.json")
    if path.suffix != ".json":
        raise RequestError(f"--out '{path}' is no JSON file; name it {path.stem}.json")
    check_output("--out", path.with_suffix(".txt"), "gpu.txt")


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

    def __init__(self, options: dict[str, Any], command: str):
        self.options = options
        self.began = time.monotonic()
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
        """Run the parts in the order of their importance; the first model comes before the others."""
        first, *others = cases
        if "numerics" in parts:
            self._device()
        base = None
        if set(parts) - {"numerics"}:
            base = self._model(first, *cases[first])
        if "models" not in parts:
            others = []
        if base is not None:
            if "torch" in parts:
                self._torch(base)
            if "layers" in parts:
                self._variant("unrolled layers", base, unroll=True)
        # The second model matters more than the other comparisons of the first, the remaining models less.
        for name in others[:1]:
            self._model(name, *cases[name])
        if base is not None:
            if "remat" in parts:
                for remat in REMATS:
                    self._variant(f"remat {remat}", base, {"model.remat": remat})
            if "flags" in parts:
                self._flags(base)
        for name in others[1:]:
            self._model(name, *cases[name])

    def _device(self) -> None:
        """Check numerics, and measure matmuls and copies."""
        from jaxdist.bench.gpu_text import off

        found = self._jax("numerics", {"part": "device"})
        self.found["device"] = found
        if not found:
            return
        for one in found["numerics"]:
            if not one["fine"]:
                self._problem(
                    f"numerics: {one['what']} is off by {off(one['error'])} of its largest value from plain float32, "
                    f"where {found['dtype']} explains {off(one['bound'])}"
                )

    def _model(self, name: str, config: str, options: dict[str, str]) -> dict[str, Any] | None:
        """Measure a model and trace some of its steps; returns what is found, or None."""
        found = self._step(name, config, options, self.options["rows"], traced=3)
        if not found:
            return None
        model = {"name": name, "config": config, "options": options} | found
        self.found["models"].append(model)
        trace_problem = found.get("trace_problem")
        if trace_problem:
            self._problem(f"{name}: the parts of the step are not known: {trace_problem}")
        return model

    def _flags(self, base: dict[str, Any]) -> None:
        """Measure the first model with each compiler flag that this jaxlib knows."""
        for name, flags in FLAGS.items():
            if refused(flags):
                self.found["notes"].append(f"{flags} is unknown to this jaxlib, and left out")
            else:
                self._variant(name, base, flags=flags)

    def _variant(
        self, name: str, base: dict[str, Any], more: dict[str, str] | None = None, unroll: bool = False, flags: str = ""
    ) -> None:
        """Measure the first model with one thing changed, with fewer steps."""
        options = base["options"] | (more or {})
        environment = {}
        if flags:
            inherited = os.environ.get("XLA_FLAGS")
            environment["XLA_FLAGS"] = f"{inherited} {flags}" if inherited else flags
        # With the rows of the first model, so that the two compare.
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
        """Measure the step of a configuration, and trace `traced` steps; without a trace, half of the repeats do."""
        repeats = self.options["repeats"]
        if not traced:
            repeats = max(1, repeats // 2)
        question = {
            "part": "step",
            "config": config,
            "overrides": options,
            "rows": rows,
            "unroll": unroll,
            "warmup": self.options["warmup"],
            "repeats": repeats,
            "traced": traced,
        }
        return self._jax(name, question, environment)

    def _torch(self, base: dict[str, Any]) -> None:
        """Measure the same model in PyTorch: compiled, or eager if compilation fails."""
        if not base["torch"]:
            self.found["notes"].append(
                f"torch: {base['name']} is not a Llama with tied embeddings and AdamW, so it has no counterpart there"
            )
            return
        if not TORCH.exists():
            self.found["notes"].append(
                "torch is not compared: benchmarks/torch_llama.py is not part of the installed package; run from a "
                "clone of jaxdist's repository that is installed with pip install -e"
            )
            return
        if importlib.util.find_spec("torch") is None:
            self.found["notes"].append("torch is not installed, so it is not compared: pip install 'jaxdist[torch]'")
            return
        question = {
            **base["torch"],
            "rows": base["rows"],
            "weights": "",
            "warmup": self.options["warmup"],
            "repeats": self.options["repeats"],
        }
        # -P keeps the folder of the script out of the module search path, where our modules could hide others.
        command = [sys.executable, "-P", str(TORCH)]
        attempts = (True, False)
        if base["device"] == "cpu":
            attempts = (False,)
        for compiled in attempts:
            found = self._child("torch", command, question | {"compile": compiled})
            if found:
                self.found["torch"] = found
                return

    def _jax(self, name: str, question: dict[str, Any], environment: dict[str, str] | None = None) -> dict | None:
        return self._child(name, [sys.executable, "-P", "-m", "jaxdist.bench.gpu_child"], question, environment)

    def _child(
        self, name: str, command: list[str], question: dict[str, Any], environment: dict[str, str] | None = None
    ) -> dict[str, Any] | None:
        """Return what a process answers; None if it fails or is not started, with a sentence on why."""
        spent = time.monotonic() - self.began
        limit = min(PART_SECONDS, self.options["seconds"] - spent)
        if limit < LEAST_SECONDS:
            self.found["notes"].append(f"{name}: left out after {spent:.0f} s; raise --seconds, or give fewer --parts")
            return None
        print(f"[{spent:4.0f} s] {name}", file=sys.stderr, flush=True)
        # Write after each part, so that a bench that is killed leaves its results so far.
        self._write()
        value, problem = _answer(command, question, {**_environment(), **(environment or {})}, limit)
        if problem:
            self._problem(f"{name}: {problem}")
        self.found["seconds"] = round(time.monotonic() - self.began, 1)
        return value

    def _problem(self, text: str) -> None:
        self.found["problems"].append(text)
        print(f"problem: {text}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        """Write the results so far to --out, and the tables beside it."""
        from jaxdist.bench.gpu_text import lines

        if self.options["out"]:
            path = Path(self.options["out"])
            write_whole(path, json.dumps(self.found, indent=1) + "\n")
            write_whole(path.with_suffix(".txt"), "\n".join(lines(self.found)) + "\n")

    def end(self) -> int:
        """Write and print all results; returns exit code 1 if anything is missing or wrong."""
        from jaxdist.bench.gpu_text import lines

        self._write()
        if self.options["json"]:
            print(json.dumps(self.found), flush=True)
        else:
            print("\n".join(lines(self.found)), flush=True)
        return 1 if self.found["problems"] else 0


def _answer(
    command: list[str], question: dict[str, Any], environment: dict[str, str], limit: float
) -> tuple[dict[str, Any] | None, str]:
    """Run a process for at most `limit` seconds, and return (answer, problem): one of the two is empty."""
    with tempfile.TemporaryDirectory(prefix="jaxdist-") as folder:
        question_file = Path(folder) / "question"
        answer_file = Path(folder) / "answer"
        log_file = Path(folder) / "log"
        question_file.write_text(json.dumps(question))
        with log_file.open("wb") as log:
            # A session of its own makes a process group, which `_kill` ends with all processes in it.
            process = subprocess.Popen(
                [*command, str(question_file), str(answer_file)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                return None, f"ended after {limit:.0f} s"
            finally:
                _kill(process)
        if answer_file.exists():
            answer = json.loads(answer_file.read_text())
            return answer.get("value"), answer.get("problem", "")
        last_words = _last_words(log_file.read_text(errors="replace"))
        return None, f"its process {how_it_ended(code)}; its last words: {last_words}"


def _kill(process: subprocess.Popen) -> None:
    """Kill a process with every process that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: str) -> str:
    """Return the error at the end of a traceback, or else the last line of a log."""
    texts = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in texts if re.match(r"[\w.]+(Error|Exception|Interrupt): ", line)]
    return (errors or texts or ["nothing"])[-1][:300]


def _environment() -> dict[str, str]:
    """Return this process's environment with one GPU, a large share of its memory, and our module search path."""
    own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    visible = gpus.visible()
    if len(visible) > 1:
        own["CUDA_VISIBLE_DEVICES"] = visible[0]
    if not any(os.environ.get(name) for name in FRACTIONS):
        # Nothing else runs on this GPU, so leave little room.
        own[FRACTIONS[0]] = "0.92"
    return os.environ | own


def _driver() -> dict[str, str] | None:
    """Return what nvidia-smi reports of the first GPU; None without it."""
    names = ("name", "driver_version", "power.limit", "clocks.max.sm", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    values = output.splitlines()[0].split(",")
    return dict(zip(names, map(str.strip, values), strict=False))
