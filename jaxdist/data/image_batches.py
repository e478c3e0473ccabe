"""From rows of images to arrays on the devices, with random crops and flips that no mesh or host can change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax
import numpy as np
from jaxtyping import Float32, Int, UInt64

from jaxdist.data.batches import IGNORED, Batch, abstract_rows, global_batch, held_out_rows, splitmix64
from jaxdist.data.images import Part
from jaxdist.sharding import Layout

PURPOSE = 0x696D616765  # "image"
"""Keeps the numbers drawn here apart from those that order the rows."""


@dataclass(frozen=True)
class Augment:
    """A crop of the padded image, and a mirror image half of the time (He et al. 2016, section 4.2: 4 pixels of 0).

    A pure function of the seed, the step and the row. `fill` "zero" pads with 0, the mean colour of a normalised
    image; "reflect" with the image itself, without repeating its edge.
    """

    seed: int
    pad: int = 4
    flip: bool = True
    fill: Literal["zero", "reflect"] = "zero"

    def __call__(
        self, images: Float32[np.ndarray, "n H W C"], rows: Int[np.ndarray, " n"], step: int
    ) -> Float32[np.ndarray, "n H W C"]:
        """`rows` are the numbers of these images in the data, 0 or more."""
        height, width = images.shape[1:3]
        down, right, mirrored = self.choices(rows, step)
        edges = ((0, 0), (self.pad, self.pad), (self.pad, self.pad), (0, 0))
        padded = (
            np.pad(images, edges, **({"mode": "reflect"} if self.fill == "reflect" else {})) if self.pad else images
        )
        out = np.empty_like(images)
        for i, (y, x) in enumerate(zip(down.tolist(), right.tolist(), strict=True)):
            out[i] = padded[i, y : y + height, x : x + width]
        out[mirrored] = out[mirrored, :, ::-1]
        return out

    def choices(self, rows: Int[np.ndarray, " n"], step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where the crops start, 0 to 2 x pad from the top and from the left, and which rows are mirrored."""
        word = splitmix64(_word(PURPOSE))
        for number in (self.seed, step):
            word = splitmix64(word + _word(number))
        words = splitmix64(word + rows.astype(np.uint64))
        below = lambda part, n: ((splitmix64(words + np.uint64(part)) >> np.uint64(32)) * np.uint64(n)) >> np.uint64(32)
        down, right = (below(part, 2 * self.pad + 1).astype(np.int64) for part in (1, 2))
        return down, right, (below(3, 2) == 1) & self.flip


def image_batch(
    images: Part,
    rows: Int[np.ndarray, " batch"],
    accumulation: int,
    mesh: jax.sharding.Mesh,
    layout: Layout,
    augment: Augment | None = None,
    step: int = 0,
) -> Batch:
    """`images` [k, B/k, H, W, C] f32, `labels` [k, B/k] and `rows` [k, B/k] (place in the batch), k = `accumulation`.

    Each process reads the rows of its own devices. `batch` must divide by k times the parts that the layout splits it
    into. A row of -1 is padding: an image of zeros with the label -1.
    """

    def read(wanted: Int[np.ndarray, " n"]) -> dict[str, np.ndarray]:
        real = wanted >= 0
        pixels = np.zeros((wanted.size, *images.shape), np.float32)
        labels = np.full(wanted.size, IGNORED, np.int32)
        found = images.read(wanted[real])
        pixels[real] = augment(found, wanted[real], step) if augment else found
        labels[real] = images.labels[wanted[real]]
        return {"images": pixels, "labels": labels}

    return global_batch(rows, abstract_image_batch(rows.size, images.shape, accumulation, mesh, layout), read)


def abstract_image_batch(
    rows: int, shape: tuple[int, int, int], accumulation: int, mesh: jax.sharding.Mesh, layout: Layout
) -> Batch:
    """Shapes and shardings of a batch of that many images of `shape` (H, W, C), as `image_batch` makes it."""
    row = {"images": jax.ShapeDtypeStruct(shape, np.float32), "labels": jax.ShapeDtypeStruct((), np.int32)}
    return abstract_rows(row, rows, accumulation, mesh, layout)


def image_validation_batches(
    images: Part, batch: int, limit: int, accumulation: int, mesh: jax.sharding.Mesh, layout: Layout
) -> Iterator[Batch]:
    """Every row once, in order, `batch` at a time as `image_batch` has them; at most the first `limit` batches, where
    that is not 0.

    The last batch is filled up with rows of the label -1: they count for nothing.
    """
    for rows in held_out_rows(images.rows, batch, limit):
        yield image_batch(images, rows, accumulation, mesh, layout)


def _word(number: int) -> UInt64[np.ndarray, " 1"]:
    return np.array([number % 2**64], np.uint64)
