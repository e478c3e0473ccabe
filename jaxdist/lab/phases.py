"""A training step told in phases: each a program of its own, with what moved in it and what every device holds after.

Nothing is computed from formulas: collectives are read from the program that XLA compiled for the phase, shapes and
bytes from the arrays that are alive.
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
from jaxdist.planning.hlo import Collective, collectives

Shape = tuple[int, ...]


def cpu_mesh(text: str) -> jax.sharding.Mesh:
    """The mesh of `text`, such as "4x1x1", over CPU devices; raises `RequestError` where the CPU is split otherwise."""
    jax.config.update("jax_platforms", "cpu")
    return start(parse_mesh(text))


@dataclass(frozen=True)
class Phase:
    name: str
    takes: tuple[str, ...]
    makes: tuple[str, ...]
    devices: tuple[int, ...]
    """Those that took part: on which lies what the phase made. Of a `send`, where from and where to."""
    moves: tuple[Collective, ...]
    alive: dict[str, dict[int, Shape]]
    """Array -> device -> shape of its piece there, after the phase."""
    bytes: dict[int, int]
    """Device -> bytes of what is alive there, after the phase."""
    initial: bool
    """Whether every watched array still has, bit for bit, the values that it began with."""

    @property
    def scalars(self) -> int:
        """Collectives that move nothing but a single number."""
        return sum(move.count for move in self.moves if not move.array_elements)

    def json(self) -> dict[str, Any]:
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
    """Kind of collective -> calls, in the order of their names; those that move a single number are left out."""
    calls = Counter()
    for move in moves:
        calls[move.kind] += move.count if move.array_elements else 0
    return {kind: calls[kind] for kind in sorted(calls) if calls[kind]}


@dataclass
class Story:
    """Arrays by name, and the phases that they have gone through. `watched` are those that should not change yet."""

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
        """Compile `function` for itself and run it. A name in `makes` that was there is replaced, and freed."""
        taken = [self.arrays[one] for one in takes]
        program = jax.jit(function).lower(*taken).compile()
        made = jax.tree.leaves(program(*taken))
        for old in set(makes) & set(self.arrays):
            self.arrays[old].delete()
        self.arrays.update(zip(makes, made, strict=True))
        devices = {device for array in made for device in array.devices()}
        moves = collectives(program.as_text(), self.mesh) if self.mesh else ()
        self._note(name, takes, makes, [device for device in self.devices if device in devices], moves)

    def send(self, name: str, array: str, device: jax.Device, arrives: str) -> None:
        """Copy an array of one device to another, where it is called `arrives`."""
        (here,) = self.arrays[array].devices()
        self.arrays[arrives] = jax.device_put(self.arrays[array], device)
        (there,) = self.arrays[arrives].devices()
        self._note(name, [array], [arrives], [here, there])

    def free(self, name: str, *arrays: str) -> None:
        """Give the memory of these arrays back."""
        gone = [self.arrays.pop(array) for array in arrays]
        for array in gone:
            array.delete()
        self._note(name)

    def number(self, name: str) -> Float[np.ndarray, "..."]:
        """The whole array, on the host."""
        return np.array(self.arrays[name])

    def _note(
        self,
        name: str,
        takes: Sequence[str] = (),
        makes: Sequence[str] = (),
        devices: Sequence[jax.Device] = (),
        moves: Sequence[Collective] = (),
    ) -> None:
        place = {device: index for index, device in enumerate(self.devices)}
        pieces = {array: of.addressable_shards for array, of in self.arrays.items()}
        alive = {array: {place[one.device]: one.data.shape for one in of} for array, of in pieces.items()}
        bytes = dict.fromkeys(place.values(), 0)
        for one in (one for of in pieces.values() for one in of):
            bytes[place[one.device]] += one.data.nbytes
        initial = all(np.array_equal(_bits(self.arrays[array]), bits) for array, bits in self._start.items())
        took_part = tuple(place[device] for device in devices)
        self.phases.append(Phase(name, tuple(takes), tuple(makes), took_part, tuple(moves), alive, bytes, initial))


def _bits(array: Float[Array, "..."]) -> np.ndarray:
    """To compare exactly: -0.0 is not 0.0, and a NaN is itself."""
    return np.array(array).view(np.uint32)


def shape_text(shape: Shape) -> str:
    """`3x4`."""
    return "x".join(map(str, shape))
