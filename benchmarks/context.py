"""The step of context parallelism beside data parallelism on the same rows, on CPU devices of one process.

    python benchmarks/context.py [--rounds 10] [--sequences 1024 2048]

Two rows of a llama on two devices: whole rows on each (`data=2`), or a half of both rows (`context=2`), by a ring or
by Ulysses. All programs take turns, step by step. Printed are medians, and the median of each turn's ratio to `data=2`.
"""

from __future__ import annotations

import argparse
import os
from statistics import median

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import jax

from jaxdist.bench.measuring import Timed, measure_together
from jaxdist.config import Config
from jaxdist.training.run import Run

SIZES = dict(family="llama", layers=2, embed=256, heads=8, kv_heads=2, mlp=512, vocab=4096)
ROWS = 2
FORMS = ("data=2", "ring", "ulysses")


def run_of(form: str, sequence: int) -> Run:
    """Return a run on two devices."""
    parallel = {}
    mesh = form
    if form != "data=2":
        parallel = dict(context=form)
        mesh = "context=2"
    return Run(
        Config(
            mesh=mesh,
            precision="float32",
            model=dict(sequence=sequence, **SIZES),
            parallel=parallel,
            train=dict(global_batch_size=ROWS),
            optimizer=dict(learning_rate=1e-12),
        )
    )


def compare(sequence: int, rounds: int) -> None:
    """Print a line for each form."""
    timed = [Timed.compile(run_of(form, sequence)) for form in FORMS]
    measure_together(timed, 1, rounds)
    for form, one in zip(FORMS, timed, strict=True):
        ratio = median(a / b for a, b in zip(one.seconds, timed[0].seconds, strict=True))
        temporaries = one.program.memory_analysis().temp_size_in_bytes / 2**20
        milliseconds = median(one.seconds) * 1e3
        print(f"{sequence:>6}  {form:<8}  {milliseconds:>8.0f}  {temporaries:>16.1f}  {ratio:>8.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 2048], help="S: tokens of a row")
    asked = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 2)
    print(f"jax {jax.__version__}, flax {flax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(", ".join(f"{name} {value}" for name, value in SIZES.items()) + f", {ROWS} rows")
    print("     S  form            ms  temporaries, MiB  / data=2")
    for sequence in asked.sequences:
        compare(sequence, asked.rounds)


if __name__ == "__main__":
    main()
