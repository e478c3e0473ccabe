"""Batches of `jaxdist.fit` that an iterator makes: where a run goes on, its state says, or it skips what was taken."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jaxdist.api.iterator_state import from_json, to_json
from jaxdist.api.request import Batch
from jaxdist.api.sources import Source, as_arrays
from jaxdist.cluster.consensus import from_all
from jaxdist.config import RequestError

ITERATOR = "iterator"
"""The fact of a checkpoint that holds the states of iterators: one for each process, or one for all."""

STATES = (("state_dict", "load_state_dict"), ("get_state", "set_state"))
"""Names of the methods that return and set the state of an iterator: of torchdata and `datasets`, of grain."""


class Iterated(Source):
    """An iterator, or something that is iterated over again and again."""

    def __init__(self, batches: Any):
        can_skip = hasattr(batches, "skip")
        if hasattr(batches, "repeat") and (can_skip or _methods_of(batches)):
            # Otherwise every further epoch of an `IterableDataset` of `datasets`, or a `tf.data.Dataset`, would begin
            # where the run went on.
            batches = batches.repeat(None)
        elif can_skip and not hasattr(batches, "__next__"):
            # Every epoch would skip the same batches.
            can_skip = False
        self.batches = batches
        self._again = not hasattr(batches, "__next__")
        """Whether it begins again after its end."""
        self._iterator: Iterator[Batch] | None = None
        if _methods_of(batches) is None:
            self._iterator = iter(batches)
        self._states: dict[int, Any] = {}
        """By the number of steps taken, for steps of which batches have been made."""
        methods = self._methods()
        self.can_resume = methods is not None or can_skip
        kind = type(batches).__name__
        if methods:
            self.about = f"a {kind}, whose state the checkpoints keep"
        elif self.can_resume:
            self.about = f"a {kind}, which skips the batches of the steps that are taken"
        else:
            self.about = f"a {kind}, which cannot be told where to go on: this run trains, but cannot be resumed"

    def _methods(self) -> tuple[Any, str, str] | None:
        """Return what has a state, and the names of its methods."""
        return _methods_of(self.batches) or _methods_of(self._iterator)

    def batch_after(self, step: int) -> Batch:
        """Return the next batch, and remember the state behind it."""
        if self._iterator is None:
            self._iterator = iter(self.batches)
        batch = next(self._iterator, None)
        if batch is None and self._again:
            self._iterator = iter(self.batches)
            batch = next(self._iterator, None)
        if batch is None:
            raise ValueError(f"batches ended after {step} steps; give an iterator of more, or fewer steps")
        methods = self._methods()
        if methods:
            owner, get, _ = methods
            self._states[step + 1] = to_json(getattr(owner, get)())
        return as_arrays(batch)

    def facts(self, step: int) -> dict[str, Any]:
        """Return the state after the batches of `step` steps, though more have been made."""
        # A thread adds the states of further batches meanwhile.
        for taken in list(self._states):
            if taken < step:
                del self._states[taken]
        if step not in self._states:
            return {}
        states = from_all(self._states[step])
        # Iterators that give all processes the same rows need only one.
        return {ITERATOR: states if any(state != states[0] for state in states) else states[:1]}

    def go_on(self, step: int, facts: Mapping[str, Any]) -> None:
        """Set the state of that step, or skip so many batches."""
        if step == 0:
            # A run that was stopped before its first step has taken no batch.
            return
        if not self.can_resume:
            raise RequestError(
                f"the run has taken {step} steps, and batches, a {type(self.batches).__name__}, cannot be told where "
                f"to go on; give a function of the step, a sequence with batch_size, or an iterator with state_dict or "
                f"skip, or name another run_dir"
            )
        methods = self._methods()
        if methods is None:
            skipped = self.batches.skip(step)
            self.batches = self.batches if skipped is None else skipped
            self._iterator = iter(self.batches)
            return
        states = facts.get(ITERATOR)
        if not states:
            raise RequestError(
                f"the checkpoint of step {step} holds no state of batches, which were given in another form; give "
                f"them as before, or name another run_dir"
            )
        if len(states) not in (1, jax.process_count()):
            raise RequestError(
                f"the checkpoint of step {step} holds the states of batches of {len(states)} processes, each of which "
                f"had rows of its own, and there are {jax.process_count()} now; start as many, or give a sequence"
            )
        state = states[jax.process_index() if len(states) > 1 else 0]
        self._states[step] = state
        owner, _, put = methods
        getattr(owner, put)(from_json(state))


def _methods_of(owner: Any) -> tuple[Any, str, str] | None:
    """Return `owner`, if it has a state, and the names of the methods that return and set it."""
    for get, put in STATES:
        if callable(getattr(owner, get, None)) and callable(getattr(owner, put, None)):
            return owner, get, put
    return None
