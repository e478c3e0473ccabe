"""The documents' commands and job script: what they ask of Slurm, and a snippet of a configuration as one command."""

from __future__ import annotations

import io
import re
import tempfile
from contextlib import redirect_stdout
from pathlib import Path

from jaxdist import train
from jaxdist.config import RequestError
from jaxdist.lab.checks.data import MODEL, data_set
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.phases import cpu_mesh
from jaxdist.launch import slurm_launch, slurm_script
from jaxdist.training import history

ROWS = 400
"""Rows to train on: enough for a batch of 256."""

OPTIONS = ["--time", "1:00:00", "--run-dir", "runs/course", "--precision", "float32"]


def requested(*words: str) -> dict[str, int]:
    """Return the numbers that a job script of `launch slurm` asks of Slurm: option -> number."""
    text = slurm_script(slurm_launch(["gpt_tiny", *words, *OPTIONS])).text()
    found = re.findall(r"^#SBATCH --([a-z-]+)=(?:gpu:)?(\d+)$", text, re.MULTILINE)
    return {name: int(number) for name, number in found}


def world(claim: Claim, each: int = 4) -> Outcome:
    """Count the processes of two nodes with so many GPUs, and of the documents' job script."""
    asked = requested("--nodes", "2", "--gpus-per-node", str(each)), requested("--nodes", "4", "--gpus-per-node", "1")
    counts = [one["nodes"] * one["ntasks-per-node"] for one in asked]
    value = " and ".join(map(str, counts))
    lines = tuple(f"{one['nodes']} nodes x {one['ntasks-per-node']} tasks" for one in asked)
    return Outcome(value, claim.met(value), lines)


def script(claim: Claim, gpus: int = 1) -> Outcome:
    """Read from a job script of `launch slurm` the nodes, tasks, GPUs of a task and cores of a task."""
    asked = requested("--nodes", "4", "--gpus-per-node", str(gpus), "--cpus-per-task", "4")
    tasks = asked["nodes"] * asked["ntasks-per-node"]
    each = asked.get("gpus-per-node", asked.get("gres", 0)) // asked["ntasks-per-node"]
    value = f"{asked['nodes']}, {tasks}, {each}, {asked['cpus-per-task']}"
    lines = tuple(f"#SBATCH --{name}={number}" for name, number in asked.items())
    return Outcome(value, claim.met(value), lines)


def snippet(claim: Claim, batch: int = 256) -> Outcome:
    """Run the DeepSpeed snippet as one command of jaxdist, on a tiny model and two devices; returns its exit code."""
    asked = ["--train.global-batch-size", str(batch), "--parallel.zero", "2", "--precision", "bfloat16"]
    sizes = {"layers": 1, "embed": 16, "heads": 2, "sequence": MODEL.sequence, "vocab": MODEL.vocab}
    tiny = [word for name, size in sizes.items() for word in (f"--model.{name}", str(size))]
    cpu_mesh("2x1x1")
    with data_set(ROWS) as data, tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as said:
        files = ["--data.path", str(data.path), "--data.validation-path", str(data.validation_path)]
        run = ["--mesh", "2x1x1", "--train.steps", "1", "--run-dir", f"{folder}/run"]
        try:
            code = train.main(["gpt_tiny", *asked, *tiny, *files, *run])
            tokens = history.read(Path(folder, "run", "metrics.jsonl"))[0]["tokens"]
            told = [line for line in said.getvalue().splitlines() if line.startswith("step 1/1")]
        except RequestError as error:
            # As the command itself would end.
            code = 2
            tokens = 0
            told = error.problems
    lines = (f"python -m jaxdist.train gpt_tiny {' '.join(asked)}", *(line.split("  norm")[0] for line in told))
    return Outcome(code, claim.met(code) and tokens == batch * MODEL.sequence, lines)


CHECKS = {
    "deepspeed-config": Check(snippet, {"batch": 1024}),
    "torchrun-world": Check(world, {"each": 2}),
    "slurm-script": Check(script, {"gpus": 2}),
}
