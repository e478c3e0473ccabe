"""Losses of files, each by itself and all together: nats per token, perplexity, and bits per byte of their text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxdist.data.held_out import HeldOut
from jaxdist.models import Params
from jaxdist.output.units import rounded
from jaxdist.training.run import Run
from jaxdist.training.task_text import TextTask


class FileLoss(NamedTuple):
    """The mean loss over the tokens of a text."""

    loss: float
    """In nats per token."""
    tokens: int
    """Tokens that are predicted."""
    bytes: int | None
    """Bytes of text that they stand for; None where there is no text."""

    @property
    def perplexity(self) -> float | None:
        """E to the loss; None where that is more than a float holds."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return None

    @property
    def bits_per_byte(self) -> float | None:
        """The loss of the whole text, in bits, over its bytes; it does not depend on the tokenizer's tokens."""
        if not self.bytes:
            return None
        return self.loss * self.tokens / (math.log(2) * self.bytes)

    def figures(self) -> dict[str, float | int | None]:
        """Return what there is to tell, by name; None for what needs bytes and has none, and for what is too large."""
        return {
            "loss": self.loss,
            "perplexity": self.perplexity,
            "bits_per_byte": self.bits_per_byte,
            "tokens": self.tokens,
            "bytes": self.bytes,
        }

    def __str__(self) -> str:
        perplexity = "above 1e308" if self.perplexity is None else f"{self.perplexity:.2f}"
        bits = "" if self.bits_per_byte is None else f"  {self.bits_per_byte:.4f} bits per byte"
        return f"loss {self.loss:.4f} nats per token over {rounded(self.tokens)} tokens  perplexity {perplexity}{bits}"


def file_losses(
    run: Run,
    params: Params,
    variables: Params,
    files: Sequence[HeldOut],
    stride: int,
    note: Callable[[], None],
) -> list[FileLoss]:
    """Return the loss of each file, in windows that begin `stride` tokens apart; call under `jax.set_mesh`.

    `note` is called before each batch: a sign of life.
    """
    task = run.task
    assert isinstance(task, TextTask)
    losses = []
    for file in files:
        means = run.measure(params, variables, task.batches_of(file, stride), note)
        assert means is not None
        losses.append(FileLoss(means["loss"], int(means["tokens"]), file.bytes))
    return losses


def together(losses: Sequence[FileLoss]) -> FileLoss:
    """Return the mean over the tokens of all; bytes are known where they are for each."""
    tokens = sum(one.tokens for one in losses)
    sizes = [one.bytes for one in losses if one.bytes is not None]
    loss = sum(one.loss * one.tokens for one in losses) / tokens
    return FileLoss(loss, tokens, sum(sizes) if len(sizes) == len(losses) else None)
