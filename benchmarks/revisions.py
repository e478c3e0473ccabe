"""The train step of small models in two checkouts of jaxdist: what XLA made of it, and its CPU time.

    git worktree add ../old REVISION
    taskset -c 0 python benchmarks/revisions.py ../old . [--pairs 12] [--steps 3] [--only "one device"]

Each checkout compiles the step in a process of its own. Printed are the figures of the optimized program, and the CPU
time of the second checkout over that of the first: both processes run on one core, take turns, and XLA uses no threads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

from turns import ratios, sentence

TINY_MIXTRAL = dict(layers=2, embed=64, heads=4, kv_heads=2, vocab=512, sequence=128, expert_mlp=128)
SHARDED = {"mesh": "data=2,expert=2", "parallel.zero": 3}
CASES = {
    "gpt": ("gpt_tiny", {}),
    "gpt, bfloat16": ("gpt_tiny", {"precision": "bfloat16"}),
    "gpt, data=2": ("gpt_tiny", {"mesh": "2x1x1"}),
    "llama": ("gpt_tiny", {"model.family": "llama", "model.kv_heads": 2}),
    "llama, bfloat16": ("gpt_tiny", {"model.family": "llama", "model.kv_heads": 2, "precision": "bfloat16"}),
    "one device": ("moe_tiny", {"model.layers": 2}),
    "one device, bfloat16": ("moe_tiny", {"model.layers": 2, "precision": "bfloat16"}),
    "expert=2": ("moe_tiny", {"model.layers": 2, "mesh": "expert=2"}),
    "data=2,expert=2, ZeRO 2": ("moe_tiny", {"model.layers": 2, **SHARDED, "parallel.zero": 2}),
    "data=2,expert=2, ZeRO 3": ("moe_tiny", {"model.layers": 2, **SHARDED}),
    "Mixtral's form, one device": (
        "mixtral_8x7b",
        {"precision": "float32", "train.global_batch_size": 8, **{f"model.{n}": v for n, v in TINY_MIXTRAL.items()}},
    ),
}
"""The shipped config, and what is set besides; the mesh is one device where none is named."""


def compiled(name: str):
    """Return (run, program) of a case, in the jaxdist that this process imports."""
    import jax

    from jaxdist.config import Config
    from jaxdist.mesh import parse_mesh
    from jaxdist.training.run import Run

    file, options = CASES[name]
    keys = tomllib.loads(Path(f"jaxdist/configs/{file}.toml").read_text())
    for option, value in {"mesh": "1x1x1", **options}.items():
        *sections, key = option.split(".")
        inner = keys
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[key] = value
    config = Config(**keys)
    run = Run(config, devices=jax.devices()[: math.prod(parse_mesh(config.mesh).values())])
    run.steps = max(config.train.steps, 1)
    with jax.set_mesh(run.mesh):
        return run, run.compile()


def figures(program) -> dict[str, object]:
    """Return what XLA counts in a program."""
    costs, memory, text = program.cost_analysis(), program.memory_analysis(), program.as_text()
    opcodes = Counter(re.findall(r"^\s+(?:ROOT )?%?\S+ = (?:\([^=]*?\)|\S+) ([a-z][a-z0-9-]*)\(", text, re.MULTILINE))
    return {
        "flops": costs["flops"],
        "bytes accessed": costs["bytes accessed"],
        "temporary bytes": memory.temp_size_in_bytes,
        "bytes of arguments": memory.argument_size_in_bytes,
        "instructions": sum(opcodes.values()),
        "loop trips": sorted(map(int, re.findall(r'known_trip_count":\{"n":"(\d+)"', text))),
        "opcodes": opcodes,
    }


def work(name: str) -> None:
    """Write the figures of a case as a line; then run as many steps as each line asks for, and write their seconds."""
    import jax

    from jaxdist.bench.measuring import random_work

    run, program = compiled(name)
    print(json.dumps(figures(program)), flush=True)
    with jax.set_mesh(run.mesh):
        state = getattr(run, "engine", run).init()
        batch = random_work(run)
        for line in sys.stdin:
            jax.block_until_ready((state, batch))
            started = time.process_time()
            for _ in range(int(line)):
                state, _ = program(state, batch)
            jax.block_until_ready(state)
            print(time.process_time() - started, flush=True)


class Checkout:
    """A process that imports the jaxdist of `tree`."""

    def __init__(self, tree: Path, name: str, steps: int):
        flags = "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false"
        env = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        command = [sys.executable, str(Path(__file__).resolve()), "--work", name]
        self.steps = steps
        self.process = subprocess.Popen(
            command, cwd=tree, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.figures = json.loads(self.process.stdout.readline())

    def turn(self) -> float:
        """Run the steps, and return their CPU seconds."""
        print(self.steps, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


def compare(name: str, old: Checkout, new: Checkout, pairs: int) -> None:
    """Print the figures of both checkouts, and their ratio."""
    print(f"\n{name}")
    for figure, before in old.figures.items():
        after = new.figures[figure]
        if figure == "opcodes":
            change = {op: after.get(op, 0) - before.get(op, 0) for op in sorted({**before, **after})}
            print("  opcodes, new - old:  ", ", ".join(f"{op} {n:+}" for op, n in change.items() if n) or "the same")
        elif isinstance(before, list):
            print(f"  {figure:<20} {before}   {after}")
        else:
            print(f"  {figure:<20} {before:>15,.0f} {after:>15,.0f}   {after / before:.5f}")
    if pairs:
        print(f"  CPU time, new / old: {sentence(ratios(old.turn, new.turn, pairs))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs="*", help="the old checkout and the new one")
    parser.add_argument("--pairs", type=int, default=12, help="pairs of turns; with 0 only figures are printed")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work)
        return
    for name in asked.only or CASES:
        old, new = (Checkout(tree.resolve(), name, asked.steps) for tree in asked.trees)
        compare(name, old, new, asked.pairs)
        old.close()
        new.close()


if __name__ == "__main__":
    main()
