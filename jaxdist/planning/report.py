"""A compiled step beside its prediction: bytes per device, collectives by axis, and where the two differ."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from jax.sharding import AbstractMesh

from jaxdist.config import Config
from jaxdist.mesh import AXES, BATCH_AXES, describe
from jaxdist.models import Model
from jaxdist.planning import communication, known_differences, memory, parameter_layout
from jaxdist.planning.cross_compile import Program
from jaxdist.planning.hardware import Gpu
from jaxdist.planning.hlo import Collective, collectives
from jaxdist.planning.kernels import Kernels, kernels
from jaxdist.planning.overlap import Sent, by_axes
from jaxdist.planning.pipelines import Pipeline, pipeline_of
from jaxdist.planning.predicted_collectives import ALL_REDUCE, Transfer
from jaxdist.planning.remedies import fitting
from jaxdist.planning.target import room, too_large
from jaxdist.sharding import Layout

PACKED = 32
"""Elements: more scalars than a step adds up over one set of axes."""

WIDEST_SCALAR = 4
"""Bytes."""

Key = tuple[tuple[str, ...], str]
"""(mesh axes, kind) of a collective."""


@dataclass(frozen=True)
class Row:
    """What is predicted and what the program moves, over one set of axes by one kind of collective, in one step."""

    axes: tuple[str, ...]
    kind: str
    what: tuple[str, ...]
    """What it is for, as predicted."""
    predicted_elements: int
    elements: int
    """Scalars left out."""
    predicted_bytes: int
    payload_bytes: int
    """Scalars left out."""
    wire_bytes: float
    """Of one device, by the ring algorithms; scalars included."""
    calls: int
    widened: bool
    """Whether the compiler may send f32 for bfloat16, as XLA:CPU does."""
    foretold: bool = True
    """Whether there is a prediction at all."""

    @property
    def as_predicted(self) -> bool:
        """To the element and byte; XLA:GPU packs scalars into small vectors, which are told by their size alone."""
        return self.foretold and not self._more_elements and not self._more_bytes

    @property
    def remark(self) -> str:
        """Why the two differ; empty where they do not."""
        if not self.foretold:
            return "not predicted"
        if self.difference:
            return f"NOT PREDICTED: {self.difference}"
        if self.elements > self.predicted_elements:
            return f"{self.elements - self.predicted_elements} packed scalars"
        if self.payload_bytes > self.predicted_bytes:
            return "sent in f32, as XLA:CPU sends bfloat16"
        return ""

    @property
    def difference(self) -> str:
        """By how much the program differs from what is predicted; empty where it does not."""
        if self._more_elements:
            return f"{self._more_elements:+,} elements"
        if self._more_bytes:
            return f"{self._more_bytes:+,} bytes, in as many elements"
        return ""

    @property
    def both(self) -> str:
        """What is predicted, and what the program moves."""
        return (
            f"{self.kind} over {'+'.join(self.axes)}: predicted {self.predicted_elements:,} elements in "
            f"{self.predicted_bytes:,} bytes, compiled {self.elements:,} in {self.payload_bytes:,}"
        )

    def without(self, elements: int, width: int) -> Row:
        """This row with so many elements of `width` bytes less predicted."""
        return replace(
            self,
            predicted_elements=self.predicted_elements - elements,
            predicted_bytes=self.predicted_bytes - width * elements,
        )

    @property
    def _more_elements(self) -> int:
        more = self.elements - self.predicted_elements
        return 0 if self.kind == ALL_REDUCE and 0 < more <= PACKED else more

    @property
    def _more_bytes(self) -> int:
        more = self.payload_bytes - self.predicted_bytes
        packed = WIDEST_SCALAR * (self.elements - self.predicted_elements)
        if self.widened and 0 < more <= self.predicted_bytes + packed:
            return 0
        return 0 if 0 <= more <= packed else more


@dataclass(frozen=True)
class Report:
    config: Config
    model: Model
    layout: Layout
    mesh: AbstractMesh
    program: Program
    target: str | None
    """The name of a GPU; None for CPU devices."""
    gpu: Gpu | None

    @cached_property
    def collectives(self) -> list[Collective]:
        return collectives(self.program.text, self.mesh)

    @cached_property
    def kernels(self) -> Kernels | None:
        """None of a program for CPUs, which are not told from what it runs."""
        return kernels(self.program.text) if self.gpu else None

    @cached_property
    def transfers(self) -> list[Transfer]:
        """As predicted; none where `unpredicted` says why."""
        return [] if self.unpredicted else communication.predict(self.config, self.model, self.layout)

    @property
    def unpredicted(self) -> str:
        return communication.unpredicted(self.config, self.layout)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        return pipeline_of(self.config, self.layout)

    @cached_property
    def memory(self) -> memory.Memory:
        return memory.predict(self.config, self.model, self.layout)

    @cached_property
    def rows(self) -> list[Row]:
        """Outermost axes first; in each, the kinds by name."""
        moved, predicted = defaultdict(list), defaultdict(list)
        for one in self.collectives:
            moved[one.axes, one.kind].append(one)
        for transfer in self.transfers:
            predicted[transfer.axes, transfer.kind].append(transfer)
        keys = sorted({*moved, *predicted}, key=lambda key: ([AXES.index(axis) for axis in key[0]], key[1]))
        told = dict(widened=self.gpu is None, foretold=not self.unpredicted)
        return [_row(key, predicted[key], moved[key], **told) for key in keys]

    @property
    def differences(self) -> list[Row]:
        """Where the program moves other elements or bytes than were predicted, or nothing was."""
        return [row for row in self.rows if not row.as_predicted]

    @cached_property
    def known(self) -> dict[Key, str]:
        """Those of `differences` that are expected, and the reason of each."""
        case = known_differences.Case(self.config, self.layout, self.program.jax, self.transfers)
        reasons = {(row.axes, row.kind): known_differences.reason(row, case) for row in self.differences}
        return {key: reason for key, reason in reasons.items() if reason}

    @property
    def unknown(self) -> list[Row]:
        """Those of `differences` that are not expected: a fault of the prediction, or of the program."""
        return [row for row in self.differences if (row.axes, row.kind) not in self.known]

    @property
    def wire_bytes_per_axis(self) -> dict[str, float]:
        """`replica+data` for what goes over both at once."""
        total = defaultdict(float)
        for row in self.rows:
            total["+".join(row.axes)] += row.wire_bytes
        return dict(total)

    @cached_property
    def sent(self) -> dict[str, Sent]:
        """By axes, as `wire_bytes_per_axis`; empty for CPU devices, whose program lets nothing run beside it."""
        return by_axes(self.collectives) if self.gpu else {}

    @property
    def ratio_to_data_parallel(self) -> float | None:
        """Elements over the batch axes, against those of plain data parallelism on as many devices."""
        plain = communication.data_parallel(self.config, self.model, self.layout)
        over = [one for one in self.collectives if set(one.axes) & set(BATCH_AXES)]
        return sum(one.wire * one.array_elements / one.elements for one in over) / plain if plain else None

    @property
    def host_seconds(self) -> float | None:
        """What a step sends each way between a device and its host, at what their link is built for; None on CPU."""
        return self.memory.host_traffic / self.gpu.host if self.gpu else None

    @property
    def notes(self) -> list[str]:
        """How it was compiled, what is not split evenly or at all, and what is counted more often than it runs."""
        parameters = parameter_layout.placed(self.config, self.model, self.layout)
        return [
            *self.program.notes,
            *parameter_layout.notes(self.config, parameters, self.layout),
            *self._branches,
        ]

    @property
    def _branches(self) -> list[str]:
        """What is counted more often than it runs."""
        if not any(one.branch for one in self.collectives):
            return []
        return [
            "collectives in branches, of which a rank takes those where it has something to run, count in all ticks"
        ]

    @property
    def too_large(self) -> str:
        """What is wrong where the target has too little memory, and what to change; empty where it fits."""
        if self.target is None:
            return ""
        needed = self.program.peak_bytes
        if needed <= room(self.target):
            return ""
        predicted = room(self.target) * self.memory.total / needed  # a prediction as large is compiled to the room
        return too_large(needed, self.target, fitting(self.config, self.model, self.layout, predicted))

    def json(self) -> dict[str, object]:
        """The schema of `docs/explain.md`."""
        program, held = self.program, self.memory
        return {
            "devices": self.mesh.size,
            "mesh": describe(self.mesh.shape),
            "target": self.target,
            "jax": program.jax,
            "precision": self.config.precision,
            "pipeline": self.pipeline and self.pipeline.json(),
            "memory": {
                "arguments": program.argument_bytes,
                "temporaries": program.temporary_bytes,
                "peak": program.peak_bytes,
                "capacity": self.gpu and self.gpu.memory,
                "host_arguments": program.host_argument_bytes,
                "host_temporaries": program.host_temporary_bytes,
                "host_seconds": self.host_seconds,
                "predicted": {**asdict(held), "arguments": held.arguments, "total": held.total},
            },
            "kernels": self.kernels and self.kernels.json(),
            "collectives": [_told(one) for one in self.collectives],
            "predicted_collectives": [_expected(transfer) for transfer in self.transfers],
            "wire_bytes_per_axis": self.wire_bytes_per_axis,
            "beside": {axes: asdict(one) for axes, one in self.sent.items()},
            "ratio_to_data_parallel": self.ratio_to_data_parallel,
            "differences": [_differing(row, self.known.get((row.axes, row.kind))) for row in self.differences],
            "lower_seconds": program.lower_seconds,
            "compile_seconds": program.compile_seconds,
            "too_large": self.too_large,
            "notes": [*self.notes, *([self.unpredicted] if self.unpredicted else [])],
        }


def _row(key: Key, predicted: list[Transfer], moved: list[Collective], **told: bool) -> Row:
    return Row(
        *key,
        what=tuple(dict.fromkeys(transfer.what for transfer in predicted)),
        predicted_elements=sum(transfer.elements for transfer in predicted),
        elements=sum(one.array_elements * one.count for one in moved),
        predicted_bytes=sum(transfer.payload_bytes for transfer in predicted),
        payload_bytes=sum(one.array_bytes * one.count for one in moved),
        wire_bytes=sum(one.wire_bytes for one in moved),
        calls=sum(one.count for one in moved),
        **told,
    )


def _told(one: Collective) -> dict[str, object]:
    return {
        "axis": "+".join(one.axes),
        "kind": one.kind,
        "count": one.count,
        "elements": one.elements * one.count,
        "payload_bytes": one.payload_bytes * one.count,
        "wire_bytes": one.wire_bytes,
        "dtype": "+".join(one.dtypes),
        "loop_depth": one.depth,
        "asynchronous": not one.sync,
        "overlapped": one.overlapped.matmuls,
    }


def _expected(transfer: Transfer) -> dict[str, object]:
    return {
        "axis": "+".join(transfer.axes),
        "kind": transfer.kind,
        "what": transfer.what,
        "count": transfer.calls,
        "elements": transfer.elements,
        "payload_bytes": transfer.payload_bytes,
        "wire_bytes": transfer.wire_bytes,
    }


def _differing(row: Row, known: str | None) -> dict[str, object]:
    """`known` is the reason of a difference that is expected."""
    return {
        "axis": "+".join(row.axes),
        "kind": row.kind,
        "predicted_elements": row.predicted_elements,
        "elements": row.elements,
        "predicted_bytes": row.predicted_bytes,
        "payload_bytes": row.payload_bytes,
        "remark": row.remark,
        "known": known,
    }
