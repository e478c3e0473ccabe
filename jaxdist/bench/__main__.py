"""Run one measurement: `python -m jaxdist.bench step`, `scaling`, `collectives` or `gpu`, then its own arguments."""

from __future__ import annotations

import sys

from jaxdist.bench import collectives, gpu, scaling, step
from jaxdist.config import RequestError, nearest
from jaxdist.request import run

MEASUREMENTS = {"step": step.main, "scaling": scaling.main, "collectives": collectives.main, "gpu": gpu.main}

USAGE = """usage: python -m jaxdist.bench MEASUREMENT [CONFIG] [options]   (MEASUREMENT --help lists the options)

  step          time and memory of the train step
  scaling       its time on several numbers of devices: speed-up, efficiency and the serial fraction
  collectives   links, matrix units and memory, without a CONFIG: a cluster file for the planner
  gpu           one GPU, without a CONFIG: numerics, the step of some Llamas, its parts, and PyTorch for comparison"""


def main(argv: list[str] | None = None) -> int:
    """Run the measurement that the first argument names; returns the exit code."""
    if argv is None:
        argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, *rest = argv
    if name not in MEASUREMENTS:
        raise RequestError(f"there is no measurement '{name}'; {nearest(name, MEASUREMENTS)}")
    return MEASUREMENTS[name](rest)


if __name__ == "__main__":
    run(main)
