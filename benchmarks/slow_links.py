"""Whole steps per second over a real slow link, by the rule by which gradients cross it.

    python -m benchmarks.slow_links large|small [ROUNDS] [RULE ...]

from the root of the repository, as root: two network namespaces with one process each, and between them a link that
lets 100 Mb/s through in each direction (`tests/cluster/hosts.py`). In each round every rule trains anew, so that other
load on the machine hits all of them; the figures are medians over the rounds. `compute` is the step of one replica
alone, with its half of the rows, while the other process does the same.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median

from tests.cluster import hosts
from tests.cluster.slow_link import RATE, Measured, measure

ROWS = 8
MODEL = (
    "--model.embed=512", "--model.heads=8", "--model.vocab=2048",
    "--optimizer.warmup=2", "--checkpoint.every=0", "--validation.every=0", "--log.tensorboard=false",
)  # fmt: skip
SIZES = {
    "large": ("--model.layers=4", "--model.sequence=128"),
    "small": ("--model.layers=2", "--model.sequence=32"),
}
"""13.7 million parameters and 512 tokens in each replica; 7.4 million and 128, with less compute for a byte."""

LOCAL_STEPS = 10

RULES = {
    "exact": (),
    "bfloat16": ("--parallel.gradient-compression=bfloat16",),
    "int8": ("--parallel.gradient-compression=int8",),
    "topk-int8": ("--parallel.gradient-compression=topk-int8",),
    "powersgd": ("--parallel.gradient-compression=powersgd",),
    "local 10": (f"--train.local-steps={LOCAL_STEPS}",),
    "local 10, int8": (f"--train.local-steps={LOCAL_STEPS}", "--parallel.gradient-compression=int8"),
}
COMPUTE = "compute"


def one_round(network: hosts.Hosts, folder: Path, size: str, rules: list[str]) -> dict[str, Measured]:
    found = {}
    model = [*MODEL, *SIZES[size]]
    alone = [*model, "--mesh=1x1x1", f"--train.global-batch-size={ROWS // 2}"]
    found[COMPUTE] = measure(network, alone, folder / COMPUTE, 2, 10, together=False)
    for rule in rules:
        words = [*model, "--mesh=replica=2", f"--train.global-batch-size={ROWS}", *RULES[rule]]
        first, last = (1, 4)
        if rule.startswith("local"):
            first, last = LOCAL_STEPS, 2 * LOCAL_STEPS
        found[rule] = measure(network, words, folder / rule.replace(", ", "-").replace(" ", "-"), first, last)
    return found


def table(title: str, rules: list[str], figure: Callable[[str], tuple[float, float, float]]) -> None:
    """Print seconds of a step, steps per second against exact, and megabytes of each rule."""
    print(title)
    print(f"{'rule':<16} {'step, s':>8} {'steps/s':>8} {'x exact':>8} {'MB/step':>8}")
    for rule in (COMPUTE, *rules):
        seconds, ratio, sent = figure(rule)
        print(f"{rule:<16} {seconds:8.3f} {1 / seconds:8.3f} {ratio:8.2f} {sent:8.2f}", flush=True)


def main() -> None:
    if why := hosts.cannot():
        sys.exit(f"slow_links: {why}")
    size = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    # Everything is compared with the exact sum.
    rules = ["exact", *[rule for rule in sys.argv[3:] or RULES if rule != "exact"]]
    versions = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "optax"))
    print(
        f"{versions}; {RATE} by tbf; {os.cpu_count()} cores; {ROWS} rows; {' '.join(SIZES[size] + MODEL)}", flush=True
    )
    results = []
    with tempfile.TemporaryDirectory() as folder, hosts.Hosts(2, Path(folder)) as network:
        network.slow("n0", RATE)
        for number in range(rounds):
            found = one_round(network, Path(folder, str(number)), size, rules)
            results.append(found)
            load = f"load {os.getloadavg()[0]:.1f}"
            exact = found["exact"].seconds_per_step

            def of_round(rule: str, found: dict = found, exact: float = exact) -> tuple[float, float, float]:
                one = found[rule]
                return one.seconds_per_step, exact / one.seconds_per_step, one.bytes_per_step / 1e6

            table(f"\nround {number + 1}, {load}", rules, of_round)

    def of_all(rule: str) -> tuple[float, float, float]:
        seconds = median(found[rule].seconds_per_step for found in results)
        ratio = median(found["exact"].seconds_per_step / found[rule].seconds_per_step for found in results)
        return seconds, ratio, median(found[rule].bytes_per_step for found in results) / 1e6

    table("\nmedians", rules, of_all)
    crossing = [found["exact"].seconds_per_step / found[COMPUTE].seconds_per_step - 1 for found in results]
    print(f"\nthe exact crossing takes {median(crossing):.1f} times the compute: {[round(c, 1) for c in crossing]}")


if __name__ == "__main__":
    main()
