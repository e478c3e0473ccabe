"""Whether the devices agree on what they all hold: an array that is replicated has copies, which nothing else compares.

A bit that flips in one copy, by a fault of the hardware (silent data corruption), stays for ever: each device adds the
same update to a copy of its own, and the loss looks healthy. Dixit et al. 2021, "Silent Data Corruptions at Scale",
found such devices in hundreds of thousands of machines.

Each device computes a checksum of its copy of each array, and nothing is sent between devices. Hosts exchange, by the
key-value store, one digest for each device and each way in which arrays are replicated; only where digests differ do
they exchange the checksums themselves.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xxhash

from jaxdist.cluster.consensus import from_all
from jaxdist.cluster.rendezvous import host_names, members
from jaxdist.output.units import counted
from jaxdist.parallel.checksums import checksums
from jaxdist.sharding import named
from jaxdist.training.forward.offload import to_device
from jaxdist.training.forward.step import TrainState
from jaxdist.training.meter import Diverged

LISTED = 4
"""Devices that a sentence names at most."""

Groups = tuple[int, ...]
"""Of each device, in the order of the mesh, the number of the part of an array that it holds.

Devices with the same number hold copies."""


class Difference(NamedTuple):
    """Copies of an array that are not equal."""

    array: str
    devices: list[int]
    """Places, in the order of the mesh, of the copies that differ from most; of all of them where there is no most."""
    copies: int


class DeviceCopies:
    """Compares the copies of all arrays of a state. Every process calls `check` after the same steps."""

    def __init__(self, mesh: jax.sharding.Mesh):
        """Take the mesh that the state lies on."""
        self.devices = list(mesh.devices.flat)
        self._program = jax.jit(lambda arrays: checksums(to_device(arrays)))
        self._groups: dict[tuple[Any, ...], Groups] = {}
        self._checked = 0
        """The last step whose copies were found to be equal."""

    def check(self, step: int, state: TrainState) -> None:
        """Raise `Diverged`, in all processes alike, where copies differ after `step`; call under `jax.set_mesh`."""
        if step == self._checked:
            return
        found = self.differences(state)
        if found:
            names = {difference.array for difference in found}
            more = f" and {counted(len(names) - 1, 'more array')}" if len(names) > 1 else ""
            first = found[0]
            raise Diverged(
                f"after step {step} the devices hold different copies of {first.array}{more}: "
                f"{self._named(first.devices)} of {first.copies} copies; memory or arithmetic of a device is wrong, "
                f"and nothing of this step is saved",
                host=self._only_host(place for difference in found for place in difference.devices),
            )
        self._checked = step

    def differences(self, state: TrainState) -> list[Difference]:
        """Return the arrays whose copies differ, in the order of their names."""
        # The weights follow from the parameters at each step, and nothing is in flight in what is saved.
        arrays = {
            name: array
            for name, array in named(state._replace(weights=None, in_flight=None)).items()
            if jnp.issubdtype(array.dtype, np.number) or array.dtype == jnp.bool_
        }
        copied = {name: groups for name, array in arrays.items() if max(np.bincount(groups := self.groups(array))) > 1}
        if not copied:
            return []
        sums = self._program([arrays[name] for name in copied])
        own = {
            shard.index[0].start or 0: dict(zip(copied, np.asarray(shard.data)[0].tolist(), strict=True))
            for shard in sums.addressable_shards
        }
        by_groups: dict[Groups, list[str]] = defaultdict(list)
        for name, groups in copied.items():
            by_groups[groups].append(name)
        found: list[Difference] = []
        for groups, names in sorted(by_groups.items()):
            digests = _joined({place: _digest([row[name] for name in names]) for place, row in own.items()})
            suspects = [place for part in _parts(groups) for place in part if len({digests[p] for p in part}) > 1]
            # All processes have the same digests, and ask for the same rows.
            if suspects:
                mine = {place: [own[place][name] for name in names] for place in suspects if place in own}
                rows = _joined(mine)
                for number, name in enumerate(names):
                    found += _differing(name, groups, {place: row[number] for place, row in rows.items()})
        return sorted(found)

    def groups(self, array: jax.Array) -> Groups:
        """Return which devices hold copies of the same part of an array."""
        key = (array.sharding, array.shape)
        if key not in self._groups:
            parts: dict[str, int] = {}
            held = array.sharding.devices_indices_map(array.shape)
            self._groups[key] = tuple(parts.setdefault(str(held[device]), len(parts)) for device in self.devices)
        return self._groups[key]

    def _only_host(self, places: Iterable[int]) -> str:
        """Return the host of all devices in these places; empty where there are several, or the run has no other."""
        hosts = host_names(self.devices)
        found = {hosts[place] for place in places}
        return found.pop() if len(found) == 1 < len(set(hosts)) else ""

    def _named(self, places: Sequence[int]) -> str:
        """Return the names of devices, with their hosts."""
        hosts = {member.process: member.host for member in members()}
        names = []
        for place in places[:LISTED]:
            process = self.devices[place].process_index
            host = f" on {hosts[process]}" if process in hosts else ""
            names.append(f"device {place} (process {process}{host})")
        if len(places) > LISTED:
            names.append(f"{len(places) - LISTED} more")
        return " and ".join(names)


def _parts(groups: Groups) -> Iterator[list[int]]:
    """Yield the places of the devices that hold copies of the same part, for each part."""
    for part in range(max(groups) + 1):
        yield [place for place, number in enumerate(groups) if number == part]


def _differing(name: str, groups: Groups, sums: Mapping[int, int]) -> Iterator[Difference]:
    """Yield what differs of one array, of whose copies `sums` has those that may."""
    for part in _parts(groups):
        having: dict[int, list[int]] = defaultdict(list)
        for place in part:
            if place in sums:
                having[sums[place]].append(place)
        if len(having) > 1:
            most = max(map(len, having.values()))
            agreeing = [places for places in having.values() if len(places) == most]
            right = agreeing[0] if len(agreeing) == 1 else []
            yield Difference(name, [place for place in part if place not in right], len(part))


def _digest(sums: Sequence[int]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(sums).encode())


def _joined(own: Mapping[int, Any]) -> dict[int, Any]:
    """Return what all processes have of their devices."""
    return {
        int(place): value for there in from_all({str(p): v for p, v in own.items()}) for place, value in there.items()
    }
