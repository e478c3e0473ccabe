"""Load batches of images onto the devices, with random crops and flips that do not depend on the mesh or the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float32, Int, UInt64

from jaxdist.data.batches import AbstractBatch, Batch, BatchLayout, global_batch
from jaxdist.data.images import Part
from jaxdist.data.order import splitmix64, word
from jaxdist.data.tokens import IGNORED

PURPOSE = int.from_bytes(b"image")
"""Separates the random numbers drawn here from those that order the rows."""


@dataclass(frozen=True)
class Augment:
    """Crop the padded image, and mirror it half of the time (He et al. 2016, section 4.2, who pad 4 pixels of 0).

    The choices are a pure function of the seed, the step and the row. `fill` "zero" pads with 0, the mean colour of a
    normalised image; "reflect" pads with the image itself, without repeating its edge.
    """

    seed: int
    pad: int = 4
    flip: bool = True
    fill: Literal["zero", "reflect"] = "zero"

    def __call__(
        self, images: Float32[np.ndarray, "n H W C"], rows: Int[np.ndarray, " n"], step: int
    ) -> Float32[np.ndarray, "n H W C"]:
        """Return the augmented images; `rows` are their numbers in the data, 0 or more."""
        height, width = images.shape[1:3]
        down, right, mirrored = self.choices(rows, step)
        edges = ((0, 0), (self.pad, self.pad), (self.pad, self.pad), (0, 0))
        padded = images
        if self.pad:
            padded = np.pad(images, edges, mode="reflect" if self.fill == "reflect" else "constant")
        out = np.empty_like(images)
        for i, (y, x) in enumerate(zip(down.tolist(), right.tolist(), strict=True)):
            out[i] = padded[i, y : y + height, x : x + width]
        out[mirrored] = out[mirrored, :, ::-1]
        return out

    def choices(self, rows: Int[np.ndarray, " n"], step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return where the crops start, 0 to 2 x pad from the top and from the left, and which rows are mirrored."""
        state = splitmix64(word(PURPOSE))
        for number in (self.seed, step):
            state = splitmix64(state + word(number))
        states = splitmix64(state + rows.astype(np.uint64))
        down = _random_below(2 * self.pad + 1, states, draw=1).astype(np.int64)
        right = _random_below(2 * self.pad + 1, states, draw=2).astype(np.int64)
        mirrored = (_random_below(2, states, draw=3) == 1) & self.flip
        return down, right, mirrored


def _random_below(n: int, states: UInt64[np.ndarray, " rows"], draw: int) -> UInt64[np.ndarray, " rows"]:
    """Return draw number `draw` of each row: an integer in range(n)."""
    # The upper 32 bits, scaled from [0, 2^32) to [0, n).
    bits = splitmix64(states + np.uint64(draw)) >> np.uint64(32)
    return (bits * np.uint64(n)) >> np.uint64(32)


def image_batch(
    images: Part,
    rows: Int[np.ndarray, " batch"],
    batch_layout: BatchLayout,
    augment: Augment | None = None,
    step: int = 0,
) -> Batch:
    """Return `images` [k, B/k, H, W, C] in f32, `labels` [k, B/k] and `rows` [k, B/k] (place in the batch).

    Each process reads the rows of its own devices. `batch` must divide by k times the number of parts into which the
    layout splits it. A row of -1 is padding: an image of zeros with the label -1.
    """

    def read(wanted: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        real = wanted >= 0
        pixels = np.zeros((wanted.size, *images.shape), np.float32)
        labels = np.full(wanted.size, IGNORED, np.int32)
        originals = images.read(wanted[real])
        pixels[real] = augment(originals, wanted[real], step) if augment else originals
        labels[real] = images.labels[wanted[real]]
        return {"images": pixels, "labels": labels}

    return global_batch(rows, abstract_image_batch(rows.size, images.shape, batch_layout), read)


def abstract_image_batch(rows: int, shape: tuple[int, int, int], batch_layout: BatchLayout) -> AbstractBatch:
    """Return the shapes and shardings of a batch of `rows` images of `shape` (H, W, C), as `image_batch` makes it."""
    row = {"images": jax.ShapeDtypeStruct(shape, np.float32), "labels": jax.ShapeDtypeStruct((), np.int32)}
    return batch_layout.abstract(rows, row)
