"""What the planner predicts of rows of 8k to 512k tokens, beside published rates.

    python -m benchmarks.long_rows

from the root of the repository. Predicted are steps of Llama 3.1 8B in bfloat16 on H100s, 8 in a host. TFLOP/s are
per GPU; they count causal attention once and leave recomputation out. Published figures:

    torchtitan   Llama 3.1 8B on 8 H100s, Float8, all blocks recomputed: tokens/s of a GPU
    NeMo         Llama 2 7B on H100s, FP8, the source does not say what is recomputed: TFLOP/s of a GPU

Both multiply matrices in 8 bits, which jaxdist does not, so that the ratios of their rows are easier to compare than
the rows themselves.
"""

from __future__ import annotations

from jaxdist.config import Config
from jaxdist.models import build_decoder
from jaxdist.planning.clusters import cluster
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.plan import search
from jaxdist.request import load

CLUSTER = cluster("h100-ndr")

DEVICES = 64

TOKENS = 512 * 8192
"""Tokens of a step, where a row is no longer than that on each device."""

TORCHTITAN = {32: (1, 3890), 64: (2, 2540), 128: (4, 1071), 256: (8, 548)}
"""Thousands of tokens of a row -> (devices along context, published tokens/s of a GPU)."""

NEMO = {4: (1, 768), 32: (2, 610), 128: (4, 555), 512: (16, 549), 1024: (32, 536)}
"""Thousands of tokens of a row -> (devices along context, published TFLOP/s of a GPU)."""


def main() -> None:
    plans()
    as_torchtitan()
    nemo()


def plans() -> None:
    """Print the best plan for rows of each length, at a fixed number of tokens in a step."""
    print(f"best plans for {DEVICES} GPUs, {TOKENS:,} tokens per step\n")
    print(f"{'row':>5}  {'mesh':<20}{'attention':<11}{'recomputes':<12}{'tokens/s/GPU':>12}{'TFLOP/s':>9}{'of 8k':>8}")
    short = None
    for thousands in (8, 32, 128, 512):
        sequence = 1024 * thousands
        found = search(asked(sequence, TOKENS // sequence), DEVICES, CLUSTER).ranked[0]
        short = short or teraflops(found)
        attention = found.attention.form if found.attention else "whole rows"
        what = f"{thousands:>4}k  {found.config.mesh:<20}{attention:<11}{found.config.model.remat:<12}"
        print(f"{what}{of_gpu(found):>12,.0f}{teraflops(found):>9.0f}{teraflops(found) / short:>8.0%}")


def as_torchtitan() -> None:
    """Print the steps that torchtitan has measured, as predicted in bfloat16."""
    print("\ntorchtitan's meshes of 8 GPUs, a row at once, all blocks recomputed\n")
    print(f"{'row':>5}  {'mesh':<18}{'published tokens/s/GPU, Float8':>31}{'predicted, bfloat16':>21}{'TFLOP/s':>9}")
    for thousands, (context, published) in TORCHTITAN.items():
        data = 8 // context
        mesh = f"data={data},context={context}"
        config = asked(1024 * thousands, data, mesh=mesh, **{"model.remat": "block", "parallel.zero": "3"})
        found = estimate(config, build_decoder(config.model), CLUSTER)
        print(f"{thousands:>4}k  {mesh:<18}{published:>31,}{of_gpu(found):>21,.0f}{teraflops(found):>9.0f}")


def nemo() -> None:
    """Print what NeMo has published."""
    print(f"\nNeMo\n\n{'row':>5}{'context':>9}{'published TFLOP/s/GPU, FP8':>28}{'of 4k':>7}")
    for thousands, (context, published) in NEMO.items():
        print(f"{thousands:>4}k{context:>9}{published:>28}{published / NEMO[4][1]:>7.0%}")


def asked(sequence: int, rows: int, **more: str) -> Config:
    """Return the request of Llama 3.1 8B on so many rows of `sequence` tokens in a step."""
    sizes = {"model.sequence": str(sequence), "train.global_batch_size": str(rows), "precision": "bfloat16"}
    return load("llama31_8b", sizes | more)


def of_gpu(found: Estimate) -> float:
    """Return the tokens per second of a GPU."""
    return found.tokens_per_second / found.devices


def teraflops(found: Estimate) -> float:
    """Return the TFLOP/s of a GPU."""
    return found.mfu * CLUSTER.peak / 1e12


if __name__ == "__main__":
    main()
