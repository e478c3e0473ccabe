"""Run a training step in phases, and record the collectives of each and the arrays on every device after it.

Each phase is a program of its own. Nothing is computed from formulas: collectives are read from the program that XLA
compiled for the phase, shapes and bytes from the arrays that are alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxdist.cluster.runtime import start
from jaxdist.mesh import parse_mesh
from jaxdist.programs.hlo import Collective, collectives

Shape = tuple[int, ...]


def cpu_mesh(text: str) -> jax.sharding.Mesh:
    """Return the mesh of `text`, such as "4x1x1", over CPU devices; raises `RequestError` if the CPU has others."""
    jax.config.update("jax_platforms", "cpu")
    return start(parse_mesh(text))


@dataclass(frozen=True)
class Phase:
    """One phase of a step, and the arrays that are alive after it."""

    name: str
    takes: tuple[str, ...]
    makes: tuple[str, ...]
    devices: tuple[int, ...]
    """The devices that hold what the phase made; for a `send`, its source and its target."""
    moves: tuple[Collective, ...]
    alive: dict[str, dict[int, Shape]]
    """Array -> device -> shape of its piece there, after the phase."""
    bytes: dict[int, int]
    """Device -> bytes of the arrays that are alive there, after the phase."""
    initial: bool
    """Whether every watched array still has its initial values, bit for bit."""

    @property
    def scalars(self) -> int:
        """Collectives that move only a single number."""
        return sum(move.count for move in self.moves if not move.array_elements)

    def json(self) -> dict[str, Any]:
        """Return the phase as a JSON object."""
        return {
            "name": self.name,
            "takes": list(self.takes),
            "makes": list(self.makes),
            "devices": list(self.devices),
            "collectives": calls_on_arrays(self.moves),
            "scalar_collectives": self.scalars,
            "alive": {name: {str(d): list(shape) for d, shape in at.items()} for name, at in self.alive.items()},
            "bytes": {str(d): count for d, count in self.bytes.items()},
            "watched_initial": self.initial,
        }


def calls_on_arrays(moves: Iterable[Collective]) -> dict[str, int]:
    """Return the calls of each kind of collective, sorted by name, without those that move a single number."""
    calls = Counter()
    for move in moves:
        # A single number, such as the loss, costs no bandwidth.
        if move.array_elements and move.count:
            calls[move.kind] += move.count
    return {kind: calls[kind] for kind in sorted(calls)}


@dataclass
class Recorder:
    """Runs phases on named arrays and records them; `watched` arrays are compared with their initial values."""

    devices: Sequence[jax.Device]
    arrays: dict[str, Array]
    watched: tuple[str, ...]
    mesh: jax.sharding.Mesh | None = None
    """Where collectives run; without one, each phase is the program of a single device."""
    phases: list[Phase] = field(default_factory=list)

    def __post_init__(self):
        self._start = {name: _bits(self.arrays[name]) for name in self.watched}
        self._note("at rest")

    def run(self, name: str, function: Callable, takes: Sequence[str], makes: Sequence[str]) -> None:
        """Compile `function` by itself and run it; an existing array named in `makes` is replaced and freed."""
        taken = [self.arrays[one] for one in takes]
        program = jax.jit(function).lower(*taken).compile()
        made = jax.tree.leaves(program(*taken))
        for old in set(makes) & set(self.arrays):
            # The old array is freed at once, as a trainer does by donating it.
            self.arrays[old].delete()
        self.arrays.update(zip(makes, made, strict=True))
        holders = {device for array in made for device in array.devices()}
        devices = [device for device in self.devices if device in holders]
        moves = ()
        if self.mesh is not None:
            moves = collectives(program.as_text(), self.mesh)
        self._note(name, takes, makes, devices, moves)

    def send(self, name: str, array: str, device: jax.Device, arrives: str) -> None:
        """Copy an array of one device to another, under the name `arrives`.

        The sender keeps its own; `free` releases it.
        """
        (here,) = self.arrays[array].devices()
        self.arrays[arrives] = jax.device_put(self.arrays[array], device)
        (there,) = self.arrays[arrives].devices()
        self._note(name, [array], [arrives], [here, there])

    def free(self, name: str, *arrays: str) -> None:
        """Free the memory of these arrays.

        Raises `KeyError` for a name that no array has, or has no longer.
        """
        for array in arrays:
            self.arrays.pop(array).delete()
        self._note(name)

    def number(self, name: str) -> Float[np.ndarray, "..."]:
        """Return a whole array on the host."""
        return np.array(self.arrays[name])

    def _note(
        self,
        name: str,
        takes: Sequence[str] = (),
        makes: Sequence[str] = (),
        devices: Sequence[jax.Device] = (),
        moves: Sequence[Collective] = (),
    ) -> None:
        """Record a phase, with what is alive now."""
        number = {device: index for index, device in enumerate(self.devices)}
        alive = {}
        bytes = dict.fromkeys(number.values(), 0)
        for array, value in self.arrays.items():
            pieces = value.addressable_shards
            alive[array] = {number[piece.device]: piece.data.shape for piece in pieces}
            for piece in pieces:
                bytes[number[piece.device]] += piece.data.nbytes
        initial = all(np.array_equal(_bits(self.arrays[array]), bits) for array, bits in self._start.items())
        took_part = tuple(number[device] for device in devices)
        self.phases.append(Phase(name, tuple(takes), tuple(makes), took_part, tuple(moves), alive, bytes, initial))


def _bits(array: Float[Array, "..."]) -> np.ndarray:
    """Return the bits of floats, to compare exactly: -0.0 is not 0.0, and a NaN equals itself."""
    return np.array(array).view(np.uint32)


def shape_text(shape: Shape) -> str:
    """Return a shape as `3x4`."""
    return "x".join(map(str, shape))
