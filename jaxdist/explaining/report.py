"""Compare a compiled step with its prediction: bytes per device, collectives by axis, and where the two differ.

A run with local steps has two programs: a `Report` shows the step of one replica, and its `outer` that of all devices,
once in H steps. What a device holds for the outer step lies beside a local step, which does not know of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import cached_property

from jax.sharding import AbstractMesh

from jaxdist.config import Config
from jaxdist.explaining import known_differences
from jaxdist.explaining.compared import Key, Row
from jaxdist.mesh import AXES, DATA, describe
from jaxdist.mesh.split import Split
from jaxdist.planning import clusters, communication, layout_notes, memory, model_report, reference_pass, transfer_time
from jaxdist.planning.clusters import Cluster
from jaxdist.planning.hardware import Gpu
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import F32, Transfer
from jaxdist.planning.remedies import fitting
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.programs.cross_compile import Program
from jaxdist.programs.hlo import Collective, collectives
from jaxdist.programs.kernels import Kernels, kernels
from jaxdist.programs.overlap import Sent, by_axes
from jaxdist.programs.target import room, too_large
from jaxdist.request import unused
from jaxdist.request.conditions import Known

SCALARS = 7
"""Numbers that a replica hands to the outer step: loss, norm, three counts, the step, and what it has learned from."""


@dataclass(frozen=True)
class Report:
    """A compiled step and its prediction; with local steps, the step of one replica, on its part of the mesh."""

    sharded: ShardedModel
    """The model on the mesh of the program, as predictions read it."""
    mesh: AbstractMesh
    program: Program
    target: str | None
    """The name of a GPU; None for CPU devices."""
    gpu: Gpu | None
    where: Cluster | None = None
    """The cluster whose hosts and sites the devices fill; None: the shipped one of the GPU."""
    outer: OuterReport | None = None
    """The outer step of local steps, which all devices of the run take together."""

    @property
    def whole(self) -> Report:
        """The report whose mesh has all devices of the run."""
        return self.programs[-1]

    @property
    def programs(self) -> list[Report]:
        """The report of each program of the run."""
        return [self, *self.outer_steps]

    @property
    def outer_steps(self) -> list[OuterReport]:
        """The outer step, if there is one."""
        return [self.outer] if self.outer else []

    @property
    def beside(self) -> dict[str, int]:
        """The bytes that lie on the device beside the program, for the outer step, by name."""
        return {name: count for one in self.outer_steps for name, count in one.held.items()}

    @property
    def peak_bytes(self) -> int:
        """The bytes that a device needs: for the program, and for what lies beside it."""
        return self.program.peak_bytes + sum(self.beside.values())

    @property
    def config(self) -> Config:
        """The request."""
        return self.sharded.config

    @cached_property
    def collectives(self) -> list[Collective]:
        """The collectives of the program."""
        return collectives(self.program.text, self.mesh)

    @cached_property
    def kernels(self) -> Kernels | None:
        """The kernels of the program; None for CPU devices, whose text does not show them.

        They are those that the compiler chose without autotuning where the GPU is not present.
        """
        if self.gpu is None:
            return None
        return kernels(self.program.text)

    @cached_property
    def transfers(self) -> list[Transfer]:
        """The predicted collectives; none where `unpredicted` gives a reason."""
        if self.unpredicted:
            return []
        return communication.predict(self.sharded)

    @property
    def unpredicted(self) -> str:
        """Why collectives are not predicted; empty where they are."""
        return communication.unpredicted(self.sharded.split)

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, or None without one."""
        return self.sharded.pipe

    @cached_property
    def memory(self) -> memory.Memory:
        """The predicted memory."""
        return memory.predict(self.sharded)

    @cached_property
    def rows(self) -> list[Row]:
        """One row for each set of axes and kind: outermost axes first; for the same axes, the kinds by name."""
        moved = defaultdict(list)
        for one in self.collectives:
            moved[one.axes, one.kind].append(one)
        predicted = defaultdict(list)
        for transfer in self.transfers:
            predicted[transfer.axes, transfer.kind].append(transfer)

        def order(key: Key) -> tuple[list[int], str]:
            axes, kind = key
            return [AXES.index(axis) for axis in axes], kind

        return [self._row(key, predicted[key], moved[key]) for key in sorted({*moved, *predicted}, key=order)]

    def _row(self, key: Key, predicted: list[Transfer], moved: list[Collective]) -> Row:
        axes, kind = key
        return Row(
            axes,
            kind,
            what=tuple(dict.fromkeys(transfer.what for transfer in predicted)),
            predicted_elements=sum(transfer.elements for transfer in predicted),
            elements=sum(one.array_elements * one.count for one in moved),
            predicted_bytes=sum(transfer.payload_bytes for transfer in predicted),
            payload_bytes=sum(one.array_bytes * one.count for one in moved),
            wire_bytes=sum(one.wire_bytes for one in moved),
            calls=sum(one.count for one in moved),
            widened=self.gpu is None,
            has_prediction=not self.unpredicted,
        )

    @cached_property
    def repeated(self) -> dict[Key, int]:
        """The bytes of one call of all collectives that run 0 or more times, because the length of a loop is unknown.

        No total has them.
        """
        found: defaultdict[Key, int] = defaultdict(int)
        for one in self.collectives:
            if one.repeated:
                found[one.axes, one.kind] += one.payload_bytes
        return dict(found)

    @property
    def differences(self) -> list[Row]:
        """The rows where the program moves other elements or bytes than predicted, or that have no prediction."""
        return [row for row in self.rows if not row.as_predicted]

    @property
    def agrees(self) -> bool:
        """Whether the programs are as predicted, but for known differences."""
        return not any(one.unknown for one in self.programs)

    @cached_property
    def known(self) -> dict[Key, str]:
        """The expected ones among `differences`, with the reason of each."""
        case = known_differences.Case(self.sharded.split, self.sharded.layout, self.program.jax, self.transfers)
        reasons = {(row.axes, row.kind): known_differences.reason(row, case) for row in self.differences}
        return {key: reason for key, reason in reasons.items() if reason}

    @property
    def unknown(self) -> list[Row]:
        """The unexpected ones among `differences`: a fault of the prediction, or of the program."""
        return [row for row in self.differences if (row.axes, row.kind) not in self.known]

    @property
    def wire_bytes_per_axis(self) -> dict[str, float]:
        """The bytes that one device sends over each set of axes, such as `replica+data` for both at once.

        They are counted in the compiled program, by the ring algorithms.
        """
        total: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            total["+".join(row.axes)] += row.wire_bytes
        return dict(total)

    @cached_property
    def sent(self) -> dict[str, Sent]:
        """The same bytes by what overlaps them; empty for CPU devices, whose program overlaps nothing."""
        if self.gpu is None:
            return {}
        return by_axes(self.collectives)

    @property
    def ratio_to_data_parallel(self) -> float | None:
        """Elements of weights and gradients over the axes that split tokens, relative to plain data parallelism there.

        None where none of them does.
        """
        plain = communication.data_parallel(self.sharded)
        if not plain:
            return None
        # Tokens on their way to experts are neither, nor is what attention sends, nor where documents start.
        over_tokens = [one for one in self.collectives if communication.purpose(one) == DATA and one.dtypes != ("s32",)]
        return sum(one.wire * one.array_elements / one.elements for one in over_tokens) / plain

    @cached_property
    def cluster(self) -> Cluster | None:
        """The cluster whose links carry the collectives: `where`, or the shipped one of the GPU; else None."""
        if self.where is not None:
            return self.where
        if self.target is None:
            return None
        return clusters.of_gpu(self.target)

    @cached_property
    def seconds_per_axis(self) -> dict[str, float]:
        """The seconds of the predicted collectives over each set of axes, as `plan` prices them, if nothing else runs.

        There are none where the links are not known.
        """
        return transfer_time.seconds_over_axes(self.transfers, self.whole.mesh.shape, self.cluster)

    @property
    def host_seconds(self) -> float | None:
        """Seconds of a step's traffic between device and host, each way, at the link's peak rate; None on CPU."""
        if self.gpu is None:
            return None
        return self.memory.host_traffic / self.gpu.host

    @property
    def notes(self) -> list[str]:
        """How it was compiled, what is not split (evenly) or not used, what counts too often, and what runs before."""
        whole = self.whole
        found = [
            *self.program.notes,
            *layout_notes.notes(whole.sharded),
            *unused.notes(whole.config, Known(whole.mesh.shape)),
        ]
        if any(one.branch for one in self.collectives):
            found.append(
                "collectives in branches count in every tick, although a rank skips those where it has nothing to run"
            )
        reference = reference_pass.note(whole.config)
        return [*found, reference] if reference else found

    @property
    def warnings(self) -> list[str]:
        """A sentence for each axis other than `replica` that spans sites, with what it costs."""
        if self.where is None:
            return []
        whole = self.whole
        rule = whole.sharded.split.crossing_traits
        outer = [transfer for one in self.outer_steps for transfer in one.transfers]
        return transfer_time.warnings(whole.mesh.shape, self.transfers, self.where, rule, outer)

    @property
    def too_large(self) -> str:
        """A sentence where the target has too little memory, with what to change; empty where the step fits."""
        if self.target is None:
            return ""
        needed = max(one.peak_bytes for one in self.programs)
        if needed <= room(self.target):
            return ""
        # Assume that prediction and program differ by the same factor after a change.
        whole = self.whole
        predicted = room(self.target) * whole.memory.total / needed
        return too_large(needed, self.target, fitting(whole.sharded, predicted))

    def json(self) -> dict[str, object]:
        """Return the schema of `docs/reference/json.md`."""
        program = self.program
        held = self.memory
        notes = self.notes
        if self.unpredicted:
            notes.append(self.unpredicted)
        return {
            "devices": self.whole.mesh.size,
            "mesh": describe(self.whole.mesh.shape),
            "target": self.target,
            "jax": program.jax,
            "precision": self.config.precision,
            "pipeline": self.pipeline.json() if self.pipeline else None,
            **model_report.context_json(self.whole.sharded.split),
            **self._of_program,
            "memory": {
                **self._memory_of_program,
                "capacity": self.gpu.memory if self.gpu else None,
                "host_temporaries": program.host_temporary_bytes,
                "host_seconds": self.host_seconds,
                "predicted": {**asdict(held), "arguments": held.arguments, "total": held.total},
            },
            "kernels": self.kernels.json() if self.kernels else None,
            "beside": {axes: asdict(one) for axes, one in self.sent.items()},
            "ratio_to_data_parallel": self.ratio_to_data_parallel,
            "outer": next((one.json() for one in self.outer_steps), None),
            "too_large": self.too_large,
            "warnings": self.warnings,
            "notes": notes,
        }

    @property
    def _memory_of_program(self) -> dict[str, object]:
        """The bytes of the program, as JSON."""
        program = self.program
        return {
            "arguments": program.argument_bytes,
            "temporaries": program.temporary_bytes,
            "peak": program.peak_bytes,
            "host_arguments": program.host_argument_bytes,
        }

    @property
    def _of_program(self) -> dict[str, object]:
        """The collectives of the program beside those that are predicted, and the time to make it, as JSON."""
        return {
            "collectives": [compiled_json(one) for one in self.collectives],
            "predicted_collectives": [predicted_json(transfer) for transfer in self.transfers],
            "wire_bytes_per_axis": self.wire_bytes_per_axis,
            "seconds_per_axis": self.seconds_per_axis,
            "differences": [differing_json(row, self.known.get((row.axes, row.kind))) for row in self.differences],
            "lower_seconds": self.program.lower_seconds,
            "compile_seconds": self.program.compile_seconds,
        }


class OuterReport(Report):
    """A compiled outer step and its prediction; `memory` is all that a device of the run holds."""

    @cached_property
    def transfers(self) -> list[Transfer]:
        """The predicted collectives."""
        return communication.outer(self.sharded)

    @property
    def local_steps(self) -> int:
        """The number H of local steps between two outer steps."""
        return self.config.train.local_steps

    @cached_property
    def step_memory(self) -> memory.Memory:
        """The predicted memory of a local step alone."""
        own = self.sharded.of_one_replica
        return memory.predict(replace(own, split=of_local_step(self.sharded.split)))

    @cached_property
    def held(self) -> dict[str, int]:
        """The bytes that lie on the device from one outer step to the next, beside the arguments of a local step."""
        of_step = self.step_memory.persistent
        beside = {name: count - of_step[name] for name, count in self.memory.persistent.items()}
        return {name: count for name, count in beside.items() if count}

    @property
    def held_on_host(self) -> int:
        """The bytes that lie beside them in host memory."""
        return self.memory.host - self.step_memory.host

    @property
    def arguments(self) -> dict[str, int]:
        """The predicted bytes of the program's arguments, by name: exact."""
        own = {"parameters of the replica": self.step_memory.parameters}
        further = int(self.config.model.images)
        return {**own, **self.held, "scalars": F32 * (SCALARS + further)}

    @property
    def host_arguments(self) -> int:
        """The predicted bytes of the program's arguments in host memory: exact."""
        # Where the common parameters rest there, those of the replica do too.
        return 2 * self.held_on_host

    @property
    def peak_bytes(self) -> int:
        """The bytes that a device needs in an outer step: for the program, and for what a local step has beside it."""
        return self.program.peak_bytes + self.step_memory.arguments - self.step_memory.parameters

    @property
    def wire_bytes_per_axis_and_step(self) -> dict[str, float]:
        """`wire_bytes_per_axis`, divided among the local steps of a round."""
        return {axes: sent / self.local_steps for axes, sent in self.wire_bytes_per_axis.items()}

    def json(self) -> dict[str, object]:
        """Return the schema of `outer` in `docs/reference/json.md`."""
        return {
            **self._of_program,
            "local_steps": self.local_steps,
            "memory": {
                **self._memory_of_program,
                "predicted": {"arguments": sum(self.arguments.values()), "host_arguments": self.host_arguments},
            },
            "held": self.held,
            "held_on_host": self.held_on_host,
            "wire_bytes_per_axis_and_step": self.wire_bytes_per_axis_and_step,
        }


def of_local_step(split: Split) -> Split:
    """Return the split of a local step: that of one replica, as if there were no others."""
    return split.of_one_replica.with_knobs({"train.local_steps": 0})


def compiled_json(one: Collective) -> dict[str, object]:
    """Return a collective of the program as JSON."""
    return _json(one, "count", "repeated", "wire_bytes") | {
        "elements": one.elements * one.count,
        "payload_bytes": one.payload_bytes * one.count,
        "dtype": "+".join(one.dtypes),
        "loop_depth": one.depth,
        "asynchronous": not one.sync,
        "overlapped": one.overlapped.matmuls,
    }


def predicted_json(transfer: Transfer) -> dict[str, object]:
    """Return a predicted collective as JSON."""
    return _json(transfer, "what", "elements", "payload_bytes", "wire_bytes") | {"count": transfer.calls}


def differing_json(row: Row, known: str | None) -> dict[str, object]:
    """Return a difference as JSON; `known` is its reason where it is expected."""
    figures = ("predicted_elements", "elements", "predicted_bytes", "payload_bytes", "remark")
    return _json(row, *figures) | {"known": known}


def _json(one: communication.Collective, *names: str) -> dict[str, object]:
    """Return the axes and the kind of a collective, and its values with these names."""
    return {"axis": "+".join(one.axes), "kind": one.kind, **{name: getattr(one, name) for name in names}}
