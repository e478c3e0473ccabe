"""`python -m jaxdist.lab model-parallel`: model parallelism by hand, with one layer on each of two devices.

A model that is too large for one device is cut between two layers, and the activations at the cut are sent by hand.
Each device then waits for the other: the idle time that pipelines fill (GPipe, Huang et al. 2019, section 2.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.lab.phases import Phase, Recorder, cpu_mesh
from jaxdist.lab.two_layers import (
    SEED,
    TOLERANCE,
    Outcome,
    backward_1,
    backward_2,
    draw,
    forward_1,
    forward_2,
    largest,
    mean_squared,
    on_one_device,
    update,
    verdict,
)
from jaxdist.output.tables import table


def in_phases(recorder: Recorder) -> Outcome:
    """Run one step, each phase where its arrays lie: the activation `h` goes forward, its gradient `dh` comes back."""
    first, second = recorder.devices
    recorder.run("forward layer 1", forward_1, ["w1", "x"], ["h"])
    recorder.send("send h", "h", second, arrives="h'")
    recorder.run("forward layer 2", forward_2, ["w2", "h'"], ["y"])
    recorder.run("loss", jax.value_and_grad(mean_squared), ["y", "t"], ["loss", "dy"])
    recorder.run("backward layer 2", backward_2, ["w2", "h'", "dy"], ["g2", "dh'"])
    recorder.send("send dh", "dh'", first, arrives="dh")
    recorder.run("backward layer 1", backward_1, ["w1", "x", "h", "dh"], ["g1", "dx"])
    recorder.run("update layer 1", update, ["w1", "g1"], ["w1"])
    recorder.run("update layer 2", update, ["w2", "g2"], ["w2"])
    return Outcome(*map(recorder.number, ("loss", "g1", "g2", "w1", "w2")))


@dataclass(frozen=True)
class Result:
    """The phases of the step, and its differences from one device."""

    phases: list[Phase]
    differences: dict[str, dict[str, float]]
    """Differences from one device."""

    @property
    def chain(self) -> list[Phase]:
        """The longest run of phases from the first on, each of which takes an array that the one before it made."""
        _, first, *rest = self.phases
        chain = [first]
        for phase in rest:
            # A phase that takes nothing of the one before could start earlier, and so ends the chain.
            if not set(phase.takes) & set(chain[-1].makes):
                break
            chain.append(phase)
        return chain

    @property
    def work(self) -> dict[int, int]:
        """Device -> how many phases of the chain it computes; sending does not count."""
        # A phase of two devices is a send.
        computing = [phase.devices for phase in self.chain if len(phase.devices) == 1]
        return {device: computing.count((device,)) for device in self.phases[0].bytes}

    @property
    def beside(self) -> list[str]:
        """Phases outside the chain, which could run while the other device works."""
        return [phase.name for phase in self.phases[1 + len(self.chain) :]]

    @property
    def passed(self) -> bool:
        """Whether only one update can overlap the chain, and the step is that of one device."""
        return self.beside == ["update layer 2"] and largest(self.differences) < TOLERANCE

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return {
            "id": "model-parallel",
            "passed": self.passed,
            "chain": [phase.name for phase in self.chain],
            "beside": self.beside,
            "phases_computed": {str(device): count for device, count in self.work.items()},
            "phases": [phase.json() for phase in self.phases],
            "differences": self.differences,
            "largest_difference": largest(self.differences),
            "tolerance": TOLERANCE,
        }

    def lines(self) -> list[str]:
        """Return fewer than 60 lines of at most 120 columns."""
        devices = list(self.work)
        rows = [("phase", *(f"device {device}" for device in devices), "takes", "makes")]
        for phase in self.phases[1:]:
            roles = [_role(phase, device) for device in devices]
            rows.append((phase.name, *roles, " ".join(phase.takes), " ".join(phase.makes)))
        computed = sum(self.work.values())
        share = " and ".join(f"device {device} works in {self.work[device]}" for device in devices)
        return [
            f"One step on {len(devices)} CPU devices, seed {SEED}: layer 1 lies on device 0, layer 2 on device 1.",
            "h is what layer 1 makes, dh the gradient of the loss with respect to it; h' and dh' are on device 1.",
            "",
            *table(rows),
            "",
            f"From '{self.chain[0].name}' to '{self.chain[-1].name}' each phase takes what the one before it has made:",
            f"none can start earlier. Of {computed} phases that compute, {share},",
            f"and never both at a time. Beside them could run only: {', '.join(self.beside)}.",
            "A pipeline therefore cuts the rows into micro-batches: while one device has one, the other has the next.",
            "",
            *verdict(self.differences, self.passed),
        ]


def _role(phase: Phase, device: int) -> str:
    """Return what a device does in a phase."""
    if device not in phase.devices:
        return "waits"
    if len(phase.devices) == 1:
        return "works"
    source, _ = phase.devices
    return "sends" if device == source else "receives"


def measure() -> Result:
    """Run the step on two devices and on one, from the same weights and rows."""
    first, second = cpu_mesh("2x1x1").devices.flat
    # Rows enter at layer 1, and targets are needed where the loss is.
    home = {"w1": first, "x": first, "w2": second, "t": second}
    arrays = {name: jax.device_put(value, home[name]) for name, value in draw().items()}
    recorder = Recorder([first, second], arrays, watched=("w1", "w2"))
    outcome = in_phases(recorder)
    return Result(recorder.phases, {"two devices": outcome.differences(on_one_device(**draw()))})
