"""Model the time of a step on H100s by rooflines, from the program that is compiled for them: no GPU is needed.

    python benchmarks/roofline.py [--out RESULTS.txt] [--longest N] [--brief] [ROW ...] [--set KNOB=VALUE ...]

A row is one of `ROWS`, or a request of your own, in quotes: "llama_1b mesh=8x1x1 train.global_batch_size=64". With
--brief each row takes a line: milliseconds of the step, those of casts, and the request.

Each kernel of the compiled program takes the time of its FLOPs or of its bytes, whichever is longer, at the rates of
`RATES`, which are assumed. What a collective sends takes the planner's time, and is exposed as far as the kernels
between its start and its done take less. roofline.md explains the table and has its results.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxdist.explain import explain
from jaxdist.explaining.report import Report
from jaxdist.output.tables import table
from jaxdist.planning import clusters, collective_time
from jaxdist.planning.hardware import GPUS
from jaxdist.planning.timing import flops_per_token
from jaxdist.programs import hlo, kernels
from jaxdist.programs.hlo_text import PRODUCTS, Instruction, arrays, called, first_operand, operands, parse, trips
from jaxdist.request import load

TARGET = "h100"


class Rates(NamedTuple):
    """Rates of an H100 in FLOP/s and bytes per second. They are assumed, not measured here."""

    products: Mapping[str, float]
    """Of matmuls, by the dtype of their operands: 80 % of the data sheet, as in `configs/clusters/h100-ndr.toml`."""
    forward: float
    """Of cuDNN's attention, whose FLOPs are those under the causal mask."""
    backward: float
    memory: float
    launch: float
    """Seconds between two kernels."""


RATES = Rates(
    products={"bf16": 790e12, "f16": 790e12, "f8e4m3fn": 1580e12, "f32": 395e12},
    forward=600e12,
    backward=480e12,
    memory=0.92 * GPUS[TARGET].bandwidth,
    launch=2e-6,
)

LARGE = {"model.heads": "16", "mesh": "1x1x1", "train.global_batch_size": "8"}
"""Llama 1B with heads of 128."""

SHARDED = {"precision": "bfloat16", "mesh": "8x1x1", "train.global_batch_size": "8", "parallel.zero": "3"}
"""Llama 8B, a row on each of 8 GPUs."""

LOOP = {"model.unroll_layers": "false"}

ROWS = {
    "1b": ("llama_1b", LARGE),
    "1b loop": ("llama_1b", {**LARGE, **LOOP}),
    "8b": ("llama_8b", SHARDED),
    "8b loop": ("llama_8b", {**SHARDED, **LOOP}),
    "8b dots": ("llama_8b", {**SHARDED, **LOOP, "model.remat": "dots"}),
    "8b block": ("llama_8b", {**SHARDED, **LOOP, "model.remat": "block"}),
}
"""Name -> (CONFIG, options): as they are shipped, and what they were chosen from."""

MATMULS = "matmuls"
FORWARD = "attention, forward"
BACKWARD = "attention, backward"
SWIGLU = "SwiGLU"
LOSS = "cross-entropy and tables"
NORMS = "norms and residual"
HEADS = "rotary positions; query, key and value"
OPTIMIZER = "optimizer, norms of gradients"
CASTS = "casts of weights and gradients"
STACKS = "copies into and out of stacks"
ZEROS = "zeros"
OTHER = "other"
EXPOSED = "exposed communication"

KINDS = (
    MATMULS,
    FORWARD,
    BACKWARD,
    SWIGLU,
    LOSS,
    NORMS,
    HEADS,
    OPTIMIZER,
    CASTS,
    STACKS,
    ZEROS,
    OTHER,
    EXPOSED,
)

SOURCES = (
    (SWIGLU, re.compile(r"activations\.py|layers\.py:GatedMLP")),
    (LOSS, re.compile(r"loss\.py|vocabulary\.py|tensor\.py:lookup|inputs\.py")),
    (NORMS, re.compile(r"models/norms\.py|models/decoder\.py:Block")),
    (HEADS, re.compile(r"models/(blocked_)?attention\.py|layers\.py:GroupedAttention|positions\.py")),
    (CASTS, re.compile(r"Model\.cast|zero\.py|sink\.py")),
    (OPTIMIZER, re.compile(r"optax|optimizer\.py|step\.py|group_norms\.py")),
)
"""What a kernel is for, by the `file:function` of the line that it was traced from."""

FLASH = "__cudnn$fmha"


@dataclass
class Time:
    """Seconds of a piece of a program, on one device."""

    by_kind: Counter[str] = field(default_factory=Counter)
    sent: float = 0
    """Seconds in which collectives are under way, exposed or not."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Seconds of each kernel, by its name."""

    @property
    def total(self) -> float:
        return sum(self.by_kind.values())

    def add(self, other: Time, times: int = 1) -> None:
        """Add `times` executions of another piece."""
        self.sent += times * other.sent
        for mine, theirs in (self.by_kind, other.by_kind), (self.kernels, other.kernels):
            for name, seconds in theirs.items():
                mine[name] += times * seconds


class Roofline:
    """Models the time of one execution of a program."""

    def __init__(self, text: str, mesh: Mesh | AbstractMesh, rates: Rates = RATES):
        self.program = parse(text)
        self.rates = rates
        self.mesh = mesh
        self.kernels = kernels.Reader(self.program)
        self.collectives = hlo.Reader(self.program, mesh)
        self.cluster = clusters.of_gpu(TARGET)
        self.sources = Sources(text)

    @cached_property
    def time(self) -> Time:
        """The time of the whole program."""
        return self.time_of(self.program.entry)

    def time_of(self, name: str) -> Time:
        """Return the time of one execution of a computation, in the order of its instructions."""
        found = Time()
        body = self.program.computations[name]
        ends: dict[str, float] = {}
        # Collectives run one after the other.
        free = 0.0
        for place, instruction in enumerate(body):
            if instruction.opcode in ("while", "call", "conditional"):
                found.add(*self.inside(instruction))
                continue
            if instruction.opcode.endswith(("-done", "-update")):
                end = ends.pop(first_operand(instruction) or "", 0.0)
                if instruction.opcode.endswith("-update"):
                    ends[instruction.name] = end
                elif end > found.total:
                    found.by_kind[EXPOSED] += end - found.total
                continue
            sent = self.collectives.at(body, place)
            if sent:
                seconds = sum(map(self.seconds_to_send, sent))
                free = max(free, found.total) + seconds
                found.sent += seconds
                if sent[0].sync:
                    found.by_kind[EXPOSED] += free - found.total
                else:
                    ends[instruction.name] = free
            elif instruction.opcode not in (*kernels.NOTHING, "async-start"):
                seconds = self.seconds(instruction)
                found.by_kind[self.kind(instruction)] += seconds
                found.kernels[instruction.name] += seconds
        return found

    def inside(self, caller: Instruction) -> tuple[Time, int]:
        """Return the time of what a loop, call or conditional runs, and how often; of branches, the longest."""
        callees = dict(called(self.program.computations, caller))
        if caller.opcode == "while":
            # As in `kernels`, a loop of unknown length counts as none: further rounds of experts.
            return self.time_of(callees["body"]), trips(self.program.computations, caller) or 0
        return max(map(self.time_of, callees.values()), key=lambda time: time.total), 1

    def seconds_to_send(self, one: hlo.Collective) -> float:
        """Return the seconds of one call of a collective, as the planner computes them."""
        group = collective_time.group_over(self.mesh.shape, one.axes, self.cluster)
        return float(collective_time.seconds_of(one.kind, one.payload_bytes, group))

    def seconds(self, instruction: Instruction) -> float:
        """Return the seconds of one kernel."""
        computing = 0.0
        if FLASH in instruction.rest:
            computing = self.seconds_of_attention(instruction)
        for product in self.products(instruction):
            dtype, _ = arrays(self.kernels.named[operands(product)[0]].type)[0]
            if dtype not in self.rates.products:
                raise ValueError(f"no rate of matmuls of {dtype} is known: {product.name}; add it to RATES")
            computing += flops(product, self.kernels.named) / self.rates.products[dtype]
        moving = self.kernels.moved_bytes(instruction) / self.rates.memory
        return max(computing, moving) + self.rates.launch

    def products(self, instruction: Instruction) -> list[Instruction]:
        """Return the matmuls in a kernel."""
        if instruction.opcode == "custom-call" and kernels.LIBRARY_PRODUCT.search(instruction.rest):
            return [instruction]
        parts = [instruction, *self.kernels.inside(instruction)]
        return [one for one in parts if one.opcode in PRODUCTS]

    def seconds_of_attention(self, call: Instruction) -> float:
        """Return the seconds of the FLOPs of cuDNN's attention, by the scores that its mask leaves.

        For each score and each element of a head, the forward pass has 4 FLOPs and the backward pass 10.
        """
        shape = re.search(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([\d,"\s]+)\]', call.rest)
        mask = re.search(r'"mask_type": ?"(CAUSAL|NO_MASK)"', call.rest)
        window = re.search(r'"sliding_window_length": ?"?[1-9]', call.rest)
        if shape is None or mask is None or window:
            raise ValueError(f"attention of a form that is not modelled here: {call.rest[:300]}")
        # The first result is the output, or the gradient of the query: [B, N, S, H].
        _, result = arrays(call.type)[0]
        scores = math.prod(int(size) for size in re.findall(r"\d+", shape[1]))
        if mask[1] == "CAUSAL":
            scores /= 2
        if "Backward" in call.rest:
            return 10 * scores * result[-1] / self.rates.backward
        return 4 * scores * result[-1] / self.rates.forward

    def kind(self, instruction: Instruction) -> str:
        """Return which of `KINDS` a kernel belongs to."""
        if FLASH in instruction.rest:
            return BACKWARD if "Backward" in instruction.rest else FORWARD
        if self.products(instruction):
            return MATMULS
        parts = [instruction, *self.kernels.inside(instruction)]
        done = {one.opcode for one in parts} - {"fusion", *kernels.NOTHING}
        if "broadcast" in done and done <= {"broadcast", "copy"}:
            return ZEROS
        if self.kernels.purpose(instruction) == "stack" or done == {"copy"}:
            return STACKS
        # Of a fusion, first the line of its result, then the lines of most of its parts.
        found = Counter(filter(None, map(self.sources.kind, parts)))
        return self.sources.kind(instruction) or max(found, key=found.__getitem__, default=OTHER)


def flops(product: Instruction, named: Mapping[str, Instruction]) -> float:
    """Return the FLOPs of a matmul: two for each product of numbers."""
    contracted = re.search(r'lhs_contracting_(?:dims=\{|dimensions": ?\[)([\d,"\s]+)[}\]]', product.rest)
    if contracted is None:
        raise ValueError(f"a product of a form that is not modelled here: {product.rest[:300]}")
    _, left = arrays(named[operands(product)[0]].type)[0]
    _, made = arrays(product.type)[0]
    summed = [left[int(dim)] for dim in re.findall(r"\d+", contracted[1])]
    return 2.0 * math.prod(made) * math.prod(summed)


class Sources:
    """The lines of source text that instructions were traced from, which a program lists before its computations."""

    def __init__(self, text: str):
        self.files = _listed(text, "FileNames")
        self.functions = _listed(text, "FunctionNames")
        self.places = _listed(text, "FileLocations")
        self.frames = _listed(text, "StackFrames")

    def kind(self, instruction: Instruction) -> str:
        """Return which of `KINDS` the innermost known line stands for; empty if there is none."""
        for line in self.lines(instruction):
            for kind, pattern in SOURCES:
                if pattern.search(line):
                    return kind
        return ""

    def lines(self, instruction: Instruction) -> Iterator[str]:
        """Yield `file:function` of each call that led to an instruction, innermost first."""
        frame = _number("stack_frame_id", instruction.rest)
        while frame:
            place = self.places[_number("file_location_id", self.frames[frame])]
            file = self.files[_number("file_name_id", place)].strip('"')
            yield f"{file}:{self.functions[_number('function_name_id', place)].strip(chr(34))}"
            parent = _number("parent_frame_id", self.frames[frame])
            # The outermost frame is its own parent.
            frame = parent if parent != frame else 0


def _listed(text: str, name: str) -> dict[int, str]:
    """Return a numbered list in front of the program. Raises `ValueError` if there is none."""
    found = re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"the program has no list of {name}, so that its kernels cannot be named")
    pairs = (line.split(" ", 1) for line in found[1].splitlines())
    return {int(number): value for number, value in pairs}


def _number(key: str, text: str) -> int:
    """Return the number after `key=`, or 0."""
    found = re.search(rf"{key}=(\d+)", text)
    return int(found[1]) if found else 0


class Row(NamedTuple):
    """A column of the table: a compiled step and its modelled time."""

    name: str
    report: Report
    time: Time
    ideal: float
    """Seconds of the FLOPs of the model at the peak of the data sheet."""


def request_of(name: str) -> tuple[str, dict[str, str]]:
    """Return (CONFIG, options) of a row of `ROWS`, or of a text "CONFIG KNOB=VALUE ..."."""
    if name in ROWS:
        return ROWS[name]
    file, *options = name.split()
    return file, dict(option.split("=", 1) for option in options)


def said(name: str) -> str:
    """Return the request of a row as text."""
    file, options = request_of(name)
    return " ".join([file, *(f"{knob}={value}" for knob, value in options.items())])


def row(name: str, knobs: Mapping[str, str]) -> Row:
    """Compile the step of the row of this name, changed by `knobs`, and model it."""
    file, options = request_of(name)
    config = load(file, {**options, **knobs})
    report = explain(config, TARGET)
    time = Roofline(report.program.text, report.mesh).time
    tokens = config.train.global_batch_size * config.model.sequence / report.mesh.size
    return Row(name, report, time, flops_per_token(config.model) * tokens / GPUS[TARGET].peak)


def head(name: str, number: int) -> str:
    """Return what stands above the column of a row: a request would be too wide."""
    return name if name in ROWS else f"row {number}"


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of all rows, in milliseconds."""
    columns = [("ms", *(head(one.name, number) for number, one in enumerate(rows, start=1)))]
    for kind in KINDS:
        columns.append((kind, *(f"{1e3 * one.time.by_kind[kind]:.1f}" for one in rows)))
    columns.append(("step", *(f"{1e3 * one.time.total:.1f}" for one in rows)))
    columns.append(("of the peak", *(f"{one.ideal / one.time.total:.1%}" for one in rows)))
    columns.append(("collectives take", *(f"{1e3 * one.time.sent:.1f}" for one in rows)))
    columns.append(("GiB of a GPU", *(f"{one.report.program.peak_bytes / 2**30:.1f}" for one in rows)))
    yield from table(columns)


def brief(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each row: milliseconds of its step, those of casts, and its request."""
    columns = [("step ms", "casts ms", "request")]
    for one in rows:
        columns.append((f"{1e3 * one.time.total:.1f}", f"{1e3 * one.time.by_kind[CASTS]:.1f}", said(one.name)))
    yield from table(columns)


def longest(one: Row, count: int) -> Iterator[str]:
    """Yield the kernels that take the longest in all, with what they are for and what they make."""
    model = Roofline(one.report.program.text, one.report.mesh)
    yield f"{one.name}: the longest kernels"
    for name, seconds in one.time.kernels.most_common(count):
        instruction = model.kernels.named[name]
        made = re.sub(r"\{[\d,]*\}", "", instruction.type)
        yield f"    {1e3 * seconds:7.2f} ms  {name[1:]:40}  {model.kind(instruction):28}  {made[:60]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help=f"{', '.join(ROWS)}, all by default, or 'CONFIG KNOB=VALUE ...'")
    parser.add_argument("--brief", action="store_true", help="print a line for each row, not a table")
    parser.add_argument("--set", nargs="*", default=[], help="KNOB=VALUE of all rows")
    parser.add_argument("--longest", type=int, default=0, help="also list so many kernels of each row")
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    asked = parser.parse_args()
    unknown = [name for name in asked.rows if name not in ROWS and "=" not in name]
    if unknown:
        parser.error(f"{', '.join(unknown)} is no row; ask for {', '.join(ROWS)}, or write 'CONFIG KNOB=VALUE ...'")
    knobs = dict(text.split("=", 1) for text in asked.set)
    rows = [row(name, knobs) for name in asked.rows or ROWS]
    told = [f"jax {jax.__version__}, {TARGET}, {' '.join(asked.set) or 'nothing set'}"]
    if asked.brief:
        told += brief(rows)
    else:
        for number, one in enumerate(rows, start=1):
            told.append(f"{head(one.name, number)}: {said(one.name)}")
            told += one.report.program.notes
        told += lines(rows)
    for one in rows if asked.longest else ():
        told += longest(one, asked.longest)
    print("\n".join(told))
    if asked.out:
        with asked.out.open("a") as file:
            file.write("\n".join([*told, "", ""]))


if __name__ == "__main__":
    main()
