"""Compare the compiled outer step of local steps with its prediction, and count what is held for it.

A run with local steps has two programs: a `Report` shows the step of one replica, and its `outer` this one, of all
devices, once in H steps. What a device holds for the outer step lies beside a local step, which does not know of it.
"""

from __future__ import annotations

from functools import cached_property

from jaxdist.config import Config
from jaxdist.mesh import AXES, REPLICA
from jaxdist.mesh.split import Split
from jaxdist.planning import communication, memory
from jaxdist.planning.predicted_collectives import F32, Transfer
from jaxdist.planning.report import Report, compiled_json, differing_json, predicted_json
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import Layout

SCALARS = 7
"""Numbers that a replica hands to the outer step: loss, norm, three counts, the step, and what it has learned from."""


def of_local_step(config: Config, layout: Layout) -> Config:
    """Return the request of a local step: that of one replica, as if there were no others."""
    one = Split(config, {axis: layout.size(axis) for axis in AXES}).of_one_replica.config
    return one.model_copy(update={"train": one.train.model_copy(update={"local_steps": 0})})


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
        own = of_local_step(self.config, self.layout)
        return memory.predict(ShardedModel.of(own, self.model, self.layout.without(REPLICA)))

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
        """The bytes that a device needs in an outer step: those of the program, and what a local step has beside it."""
        return self.program.peak_bytes + self.step_memory.arguments - self.step_memory.parameters

    @property
    def wire_bytes_per_axis_and_step(self) -> dict[str, float]:
        """`wire_bytes_per_axis`, divided among the local steps of a round."""
        return {axes: sent / self.local_steps for axes, sent in self.wire_bytes_per_axis.items()}

    def json(self) -> dict[str, object]:
        """Return the schema of `outer` in `docs/reference/json.md`."""
        program = self.program
        return {
            "local_steps": self.local_steps,
            "memory": {
                "arguments": program.argument_bytes,
                "temporaries": program.temporary_bytes,
                "peak": program.peak_bytes,
                "host_arguments": program.host_argument_bytes,
                "predicted": {"arguments": sum(self.arguments.values()), "host_arguments": self.host_arguments},
            },
            "held": self.held,
            "held_on_host": self.held_on_host,
            "collectives": [compiled_json(one) for one in self.collectives],
            "predicted_collectives": [predicted_json(transfer) for transfer in self.transfers],
            "wire_bytes_per_axis": self.wire_bytes_per_axis,
            "wire_bytes_per_axis_and_step": self.wire_bytes_per_axis_and_step,
            "differences": [differing_json(row, self.known.get((row.axes, row.kind))) for row in self.differences],
            "lower_seconds": program.lower_seconds,
            "compile_seconds": program.compile_seconds,
        }
