"""`python -m jaxdist.bench step`, `scaling`, `collectives` or `gpu`: which measurement, then its own arguments."""

from __future__ import annotations

import sys

from jaxdist.bench import collectives, gpu, scaling, step
from jaxdist.config import RequestError, nearest
from jaxdist.request import run

MEASUREMENTS = {"step": step.main, "scaling": scaling.main, "collectives": collectives.main, "gpu": gpu.main}

USAGE = """usage: python -m jaxdist.bench MEASUREMENT [CONFIG] [options]   (--help tells more)

  step          time and memory of the train step
  scaling       its time on several numbers of devices: speed-up, efficiency and the serial fraction
  collectives   links, matrix units and memory, without a CONFIG: a cluster for the planner
  gpu           one GPU, without a CONFIG: numerics, the step of some Llamas, what it consists of, and PyTorch's"""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] not in MEASUREMENTS:
        raise RequestError(f"there is no measurement '{argv[0]}'; {nearest(argv[0], MEASUREMENTS)}")
    return MEASUREMENTS[argv[0]](argv[1:])


if __name__ == "__main__":
    run(main)
