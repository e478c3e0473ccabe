"""Text that a run writes while it trains: continuations of the same prompts, with the same draws each time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from jaxdist.config import RequestError
from jaxdist.huggingface.given_tokenizer import ids_of, largest_id, load_tokenizer
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.models import Params
from jaxdist.training.decoding import Choice, Decoding, check_fits, continued, room_for
from jaxdist.training.intervals import due
from jaxdist.training.run import Run

TOKENS = 50
"""Tokens of a continuation, at most."""

TEMPERATURE = 0.8
TOP_K = 50


class Samples:
    """Continues the prompts of `sample.prompts`, one a line, with the weights of the moment."""

    def __init__(self, run: Run):
        """Encode the prompts.

        Raises `RequestError` where the run has no tokenizer, where a prompt is too long, and where the texts do not fit
        into the memory beside the train state.
        """
        self.run = run
        self.every = run.config.sample.every
        self.prompts = run.config.sample.prompts.splitlines()
        text = run.task.tokenizer
        if text is None:
            raise RequestError(
                f"sample.every is {self.every}, but the data came as tokens, and nothing here turns a prompt into "
                f"tokens; set it to 0"
            )
        self.tokenizer = load_tokenizer(text)
        special = run.task.special_tokens or SpecialTokens()
        self.stops = special.stops
        self.note: str | None = None
        """A sentence about how prompts were read, if there is one to tell."""
        if run.task.asks:
            self.ids = [self._asked(prompt, run.task.asks) for prompt in self.prompts]
        else:
            encoded = [ids_of(self.tokenizer, prompt) for prompt in self.prompts]
            own = sum(special.has_own(ids) for ids in encoded)
            self.note = special.own_note(self.tokenizer, own, "prompt") if own else None
            self.ids = [special.around(ids) for ids in encoded]
        sequence = run.config.model.sequence
        for prompt, ids in zip(self.prompts, self.ids, strict=True):
            if len(ids) >= sequence:
                raise RequestError(
                    f"sample.prompts has {prompt[:40]!r}..., of {len(ids)} tokens, to which model.sequence {sequence} "
                    f"leaves no room for more; shorten it"
                )
        # Now, and not at the first sample, up to which the run would have trained in vain.
        room = room_for(run, self.ids, TOKENS)
        check_fits(run, len(self.ids), room, run.predicted_memory.arguments)

    def _asked(self, prompt: str, asks: Callable[[str], str]) -> list[int]:
        """Return a prompt as the model is asked in the conversations that it learns from."""
        try:
            return ids_of(self.tokenizer, asks(prompt))
        except ValueError as error:
            raise RequestError(
                f"sample.prompts has {prompt[:40]!r}, which the chat template does not take: {error}; write another"
            ) from error

    def due(self, steps: range) -> bool:
        """Return whether to write after the round of `steps`."""
        return due(steps, self.every)

    def write(self, params: Params, moving: Callable[[], object]) -> list[str]:
        """Return each prompt with its continuation; `moving` is called before each token, as a sign of life.

        The parameters stay as they are, and no random number of the run is used.
        """
        choice = Choice(TEMPERATURE, TOP_K, entries=largest_id(self.tokenizer) + 1)
        self._decoding.load(params)
        seed = self.run.config.train.seed
        texts = continued(self._decoding, self.ids, TOKENS, choice, seed, self.stops, moving)
        # The next steps need the memory.
        self._decoding.load(None)
        return [self.tokenizer.decode(text) for text in texts]

    @cached_property
    def _decoding(self) -> Decoding:
        """One for the whole run, so that its programs are compiled once."""
        return Decoding(self.run, beside=self.run.predicted_memory.arguments)
