"""What a checkpoint keeps of the run's mixture, and how a run goes on from there with this mixture or with another.

The rows before the checkpoint stay as they were, so that rows of a source neither repeat nor are left out. From there
on another mixture holds only where `data.changed` allows it. No jax here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.config import Config, RequestError
from jaxdist.config.mixture import describe_shares
from jaxdist.data.mixing.phases import Phase, continued, phases_of, same_phases
from jaxdist.files import WRONG_CONTENT

MIXTURE = "mixture"
"""The key in the facts of a checkpoint."""


@dataclass(frozen=True)
class MixtureRecord:
    """The mixture of a run, with all phases that it has had and will have."""

    asked: list[Phase]
    """The phases that its configuration asks for."""
    phases: list[Phase]
    """The phases of all its rows. They are others where the mixture was changed on resume."""
    rows: dict[str, int]
    """The number of training rows of each source."""
    fingerprints: dict[str, str]
    """The fingerprint of the data of each source."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> MixtureRecord | None:
        """Return what a checkpoint with these facts keeps; None where it was saved without a mixture.

        Raises `RequestError` for a record that is damaged.
        """
        if facts.get(MIXTURE) is None:
            return None
        try:
            kept = facts[MIXTURE]
            phases = {
                name: [Phase(int(one["row"]), dict(one["weights"])) for one in kept[name]]
                for name in ("asked", "phases")
            }
            return cls(**phases, rows=dict(kept["rows"]), fingerprints=dict(kept["fingerprints"]))
        except WRONG_CONTENT as error:
            raise RequestError(
                "what the checkpoint keeps of the mixture cannot be read; go back to another step"
            ) from error

    def facts(self) -> dict[str, Any]:
        """Return it for the facts of a checkpoint."""
        both = {
            name: [{"row": phase.start, "weights": dict(phase.weights)} for phase in some]
            for name, some in (("asked", self.asked), ("phases", self.phases))
        }
        return {MIXTURE: {**both, "rows": self.rows, "fingerprints": self.fingerprints}}

    def going_on(self, here: MixtureRecord, row: int, changed: bool, batch: int, folder: Path) -> MixtureRecord:
        """Return the mixture of the run that goes on from a row, where its configuration asks for the one `here`.

        `changed` allows other weights and sources from that row on. Raises `RequestError` where they are not allowed,
        and where a source has other data than before.
        """
        check_mixture(self, here.asked, changed, batch, folder)
        others = [name for name, now in here.fingerprints.items() if self.fingerprints.get(name, now) != now]
        if others:
            name = others[0]
            more = (
                f" (and {len(others) - 1} more, perhaps because one tokenizer was trained on all)" if others[1:] else ""
            )
            raise RequestError(
                f"the data of '{name}'{more} are not what the run in {folder} has seen so far (fingerprint "
                f"{here.fingerprints[name][:12]} here, {self.fingerprints[name][:12]} there); put them back, or give "
                "them another name in data.mixture, with --data.changed true"
            )
        phases = self.phases
        if not same_phases(self.asked, here.asked):
            phases = continued(self.phases, here.asked, row)
        return MixtureRecord(here.asked, phases, {**self.rows, **here.rows}, {**self.fingerprints, **here.fingerprints})


def asked_by(config: Config) -> list[Phase] | None:
    """Return the phases of the mixture that a configuration asks for; None where it asks for none."""
    if config.data.mixture is None:
        return None
    return phases_of(config.data.mixture, config.train.steps, config.train.global_batch_size)


def check_mixture(there: MixtureRecord, asked: Sequence[Phase], changed: bool, batch: int, folder: Path) -> None:
    """Raise `RequestError` where a run is to go on with another mixture, and nothing allows it."""
    if changed or same_phases(there.asked, asked):
        return
    same = "ask for the same"
    later = there.asked[1:]
    if later and [phase.weights for phase in there.asked] == [phase.weights for phase in asked]:
        steps = " and ".join(f"from = {phase.start // batch}" for phase in later)
        same = f"only its phases begin elsewhere, as those do that begin from a part of train.steps; write {steps}"
    raise RequestError(
        f"run folder {folder} holds a run with another mixture ({described(there.asked, batch)} there, "
        f"{described(asked, batch)} here); {same}, or change it from here on with --data.changed true"
    )


def described(phases: Sequence[Phase], batch: int) -> str:
    """Return the shares in each phase in one line."""
    first, *later = phases
    texts = [describe_shares(first.weights)]
    texts += [f"after {phase.start // batch} steps {describe_shares(phase.weights)}" for phase in later]
    return "; ".join(texts)
