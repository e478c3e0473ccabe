"""`python -m jaxdist`: the list of commands; `python -m jaxdist train ...` is `python -m jaxdist.train ...`."""

from __future__ import annotations

import importlib
import sys

from jaxdist import __version__
from jaxdist.config import nearest
from jaxdist.request import outcome, run

COMMANDS = {
    "train": "train a model, or resume a run",
    "launch local": "start a run of several processes on this machine, and restart it after failures",
    "launch slurm": "write or submit the Slurm job of a run, which saves and requeues itself",
    "launch kubernetes": "print the manifest of a run for Kubernetes: a Job or a JobSet, which resumes by itself",
    "evaluate": "compute the validation loss of a run's checkpoint",
    "generate": "generate text from a run's checkpoint",
    "checkpoints": "list, verify, prune or export the checkpoints of a run",
    "compare": "show runs side by side: losses, speed, and the knobs in which they differ, with a picture",
    "data": "look at data before a training: documents, lengths, duplicates, tokens, what would be refused",
    "explain": "show the memory and communication of a step, compiled for any mesh and any GPU",
    "plan": "rank meshes for a number of devices of a cluster by predicted time and memory",
    "doctor": "diagnose machines, network and folders; find slow or unresponsive ranks of a run",
    "bench step": "measure the train step: time, tokens per second, MFU, memory",
    "bench scaling": "measure the step on several numbers of devices: speed-up, efficiency, serial fraction",
    "bench collectives": "measure links, matmuls and memory, and write a cluster file for the planner",
    "bench gpu": "test one GPU: numerics, Llama 1B and 3B, the parts of a step, and a comparison with PyTorch",
    "lab": "run the experiments of the lectures, with every number read from the devices",
    "completion": "print a script that completes commands, options and values in bash, zsh or fish",
}

MODULES = {name: f"jaxdist.{name}.__main__" for name in ("bench", "completion", "data", "doctor", "lab")}
"""Modules of the commands that are packages; the other commands are modules of their own name."""


def main(argv: list[str] | None = None) -> int:
    """List the commands, or pass the rest of `argv` on to the one it names. Return the exit code."""
    if argv is None:
        # The results of these two are in files, so they continue without standard output.
        run(main, needs_output=sys.argv[1:2] not in (["train"], ["launch"]))
    word = argv[0] if argv else "--help"
    rest = argv[1:]
    if word in ("--help", "-h"):
        print("usage: python -m jaxdist.COMMAND ...   (see COMMAND --help)\n\ncommands:")
        print("\n".join(f"  {name:<18}{line}" for name, line in COMMANDS.items()))
        return 0
    if word == "--version":
        print(f"jaxdist {__version__}")
        return 0
    # `launch` and `bench` are listed several times.
    words = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    if word not in words:
        print(f"jaxdist: unknown command '{word}'; {nearest(word, words)}", file=sys.stderr)
        return 2
    return outcome(importlib.import_module(MODULES.get(word, f"jaxdist.{word}")).main, rest)


if __name__ == "__main__":
    sys.exit(main())
