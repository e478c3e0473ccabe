"""What options of XLA's change in the schedule of a step for several GPUs, which are not there.

    python benchmarks/flags_target.py [--out RESULTS.txt] [CASE ...] [--only 'VARIANT+VARIANT']

Each case is lowered once, and compiled for each variant. First stands the time of the step as `roofline.py` models it,
with the part in which the device waits for collectives, and the part that copies into and out of stacks take: by this
time the options are chosen that jaxdist sets (`jaxdist/cluster/xla_options.py`). Then, for the axes that are sent over,
the bytes of one device in a step, by what runs beside them: matrix products / smaller kernels / nothing; what copies
and transposes read and write; how many products there are; and what the program holds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import jax
import roofline
from jax.sharding import AbstractMesh
from telling import teller

from jaxdist.cluster import xla_options
from jaxdist.mesh import abstract_mesh, devices_asked, parse_mesh
from jaxdist.output.units import size
from jaxdist.programs import target
from jaxdist.programs.compiled import memory_of, text_of
from jaxdist.programs.hlo import collectives
from jaxdist.programs.kernels import kernels
from jaxdist.programs.overlap import by_axes
from jaxdist.request import load
from jaxdist.training import run

TARGET = "h100"

BLOCK = {"model.remat": "block"}

CASES = {
    "data": ("llama_8b", {**BLOCK, "mesh": "8x1x1"}),
    "kept": ("llama_8b", {"mesh": "8x1x1", "model.remat": "none"}),
    "accumulation": (
        "llama_8b",
        {**BLOCK, "mesh": "8x1x1", "train.accumulation": "2", "train.global_batch_size": "16"},
    ),
    "hosts": ("llama_8b", {**BLOCK, "mesh": "64x1x1", "train.global_batch_size": "64"}),
    "sequence": (
        "llama_8b",
        {
            **BLOCK,
            "mesh": "16x8x1",
            "parallel.sequence": "true",
            "train.accumulation": "4",
            "train.global_batch_size": "64",
        },
    ),
    "tensor": ("llama_8b", {**BLOCK, "mesh": "4x2x1", "parallel.sequence": "true"}),
    "1b": ("llama_1b", {"mesh": "8x1x1", "train.global_batch_size": "64"}),
    "1b hosts": ("llama_1b", {"mesh": "64x1x1", "train.global_batch_size": "512"}),
    "small": ("llama_1b", {"mesh": "8x1x1", "model.remat": "block", "model.sequence": "2048"}),
    "zero2": ("llama_1b", {"mesh": "8x1x1", "model.remat": "block", "model.sequence": "2048", "parallel.zero": "2"}),
}
"""As the files have it, but for what is named: 8192 tokens in a row of 8B."""

COMMON = {
    "precision": "bfloat16",
    "train.global_batch_size": "8",
    "parallel.zero": "3",
    "parallel.micro_batches": "inside",
    "model.unroll_layers": "false",
}
"""A row or two for each device, so that the step fits: where memory is short, XLA lets nothing run beside anything."""

SERIES = xla_options.series()
GATHER, SCATTER = "xla_gpu_enable_pipelined_all_gather", "xla_gpu_enable_pipelined_reduce_scatter"
ON: bool | str = True
OFF: bool | str = False
if SERIES != "0.10":
    GATHER, SCATTER = "xla_gpu_pipeline_all_gather", "xla_gpu_pipeline_reduce_scatter"
    ON, OFF = f"{xla_options.MODE}ON", f"{xla_options.MODE}OFF"

Options = dict[str, bool | str | int]
VARIANTS: dict[str, Options] = {
    "as it comes": {},
    "no scatter": {SCATTER: OFF},
    "gather": {GATHER: ON},
    "gather, no scatter": {GATHER: ON, SCATTER: OFF},
    "scatter": {SCATTER: ON},
    "gather, scatter": {GATHER: ON, SCATTER: ON},
    "scheduler": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "no scheduler": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "double buffer": {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_DOUBLE_BUFFER"},
    "combined": {f"xla_gpu_{kind}_combine_threshold_bytes": 10**9 for kind in ("all_gather", "reduce_scatter")},
}
"""What is asked for. What is not asked for stays as XLA has it, which is not the same as `false`: jaxlib 0.11 and 0.12
schedule otherwise where the scheduler is off, on, or not named."""

FIRST = 4
"""Variants that are compiled unless others are asked for."""


def lower(name: str, overrides: dict[str, str]) -> tuple[jax.stages.Lowered, AbstractMesh]:
    """Lower the train step, without jaxdist's own options. Also return its mesh."""
    config = load(name, {**COMMON, **overrides})
    shape = parse_mesh(config.mesh)
    devices = target.devices(TARGET, devices_asked(shape))
    config = config.with_precision(cpu=False, capability=target.gpu_of(TARGET).capability)
    return run.lower_step(config, devices), abstract_mesh(shape)


def measured(step: jax.stages.Lowered, mesh: AbstractMesh, variant: str) -> str:
    """Compile a variant, and return its line."""
    start = time.perf_counter()
    try:
        program = step.compile(compiler_options=dict(VARIANTS[variant]))
    except jax.errors.JaxRuntimeError as error:
        return f"    {variant:<19} died: {str(error)[-150:]!r}"
    took = time.perf_counter() - start
    text = text_of(program)
    sent = by_axes(collectives(text, mesh))
    parts = [
        f"{axes} {size(one.products)} / {size(one.kernels)} / {size(one.exposed)}"
        for axes, one in sent.items()
        if one.total >= 2**20
    ]
    modelled = roofline.Roofline(text, mesh).time
    exposed, stacks = (1e3 * modelled.by_kind[kind] for kind in (roofline.EXPOSED, roofline.STACKS))
    total = f"{1e3 * modelled.total:.1f} ms, exposed {exposed:.1f}, stacks {stacks:.1f}"
    found = kernels(text)
    copies = f"copies {found.copied / found.bytes:.1%} of {size(found.bytes)}"
    products = f"{sum(found.products.values())} products"
    temporaries = f"temporaries {size(memory_of(program).temp_size_in_bytes)}, compiled in {took:.0f} s"
    return f"    {variant:<19} {total}; {', '.join(parts)}; {copies}; {products}; {temporaries}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--only", default="", help="variants, with + between them; the first four by default")
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    asked = parser.parse_args()
    tell = teller(asked.out)
    # Otherwise JAX's CUDA plug-in looks for a GPU, and fails.
    jax.config.update("jax_platforms", "cpu")
    xla_options.OPTIONS.clear()
    for case in asked.cases or CASES:
        name, overrides = CASES[case]
        knobs = " ".join(f"{knob}={value}" for knob, value in {**COMMON, **overrides}.items())
        tell(f"jax {jax.__version__}, {case}: {name} {knobs}")
        step, mesh = lower(name, overrides)
        for variant in asked.only.split("+") if asked.only else list(VARIANTS)[:FIRST]:
            tell(measured(step, mesh, variant))


if __name__ == "__main__":
    main()
