"""The documents' commands and job script: what they ask of Slurm, and a snippet of a configuration as one command."""

from __future__ import annotations

import re

from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.launch import slurm_launch, slurm_script

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


CHECKS = {
    "torchrun-world": Check(world, {"each": 2}),
    "slurm-script": Check(script, {"gpus": 2}),
}
