"""`python -m jaxdist`: the list of commands; `python -m jaxdist train ...` is `python -m jaxdist.train ...`."""

from __future__ import annotations

import importlib
import sys

from jaxdist import __version__
from jaxdist.config import nearest
from jaxdist.request import outcome
from jaxdist.streams import protect

COMMANDS = {
    "train": "train a model, or go on with a run",
    "launch local": "start a run of several processes on this machine, and keep it going",
    "launch slurm": "write the Slurm job of a run, or submit it: it saves and requeues itself",
    "evaluate": "the validation loss of a run's checkpoint",
    "generate": "text from a run's checkpoint",
    "checkpoints": "what a run has saved: list, verify, prune, export",
    "explain": "what a step holds and moves, compiled for any mesh, also of GPUs that are not here",
    "plan": "which mesh for so many devices of a cluster, ranked by predicted time and memory",
    "doctor": "what is wrong with machines, network and folders; who is slow or silent in a run",
    "bench step": "measure the train step: time, tokens per second, MFU, memory",
    "bench scaling": "the step on several numbers of devices: speed-up, efficiency, serial fraction",
    "bench collectives": "what links, matrix units and memory do: a cluster for the planner",
    "bench gpu": "one GPU: numerics, Llama 1B and 3B, what a step consists of, and PyTorch beside it",
    "lab": "what the lectures tell, run: every number read from the devices",
}

MODULES = {name: f"jaxdist.{name}.__main__" for name in ("bench", "doctor", "lab")}
"""Where a command that is a package lives; the others are modules of their own name."""


def main(argv: list[str] | None = None) -> int:
    """List the commands, or pass the rest of `argv` on to the one it names. Returns the exit code."""
    if argv is None:
        protect(output=sys.argv[1:2] in (["train"], ["launch"]))
    word, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if word in ("--help", "-h"):
        print("usage: python -m jaxdist.COMMAND ...   (--help tells more)\n\ncommands:")
        print("\n".join(f"  {name:<18}{line}" for name, line in COMMANDS.items()))
        return 0
    if word == "--version":
        print(f"jaxdist {__version__}")
        return 0
    words = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    if word not in words:
        print(f"jaxdist: unknown command '{word}'; {nearest(word, words)}", file=sys.stderr)
        return 2
    return outcome(importlib.import_module(MODULES.get(word, f"jaxdist.{word}")).main, rest)


if __name__ == "__main__":
    sys.exit(main())
