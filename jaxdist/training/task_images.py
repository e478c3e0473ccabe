"""Labelled images: a network that knows nothing of meshes learns their classes."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jaxdist.config import RequestError
from jaxdist.data.batches import AbstractBatch, Batch, BatchLayout
from jaxdist.data.images import Images, open_images
from jaxdist.data.images.batches import Augment, abstract_image_batch, image_batch
from jaxdist.models import images
from jaxdist.models.foreign import Foreign
from jaxdist.output.units import counted
from jaxdist.parallel.placing import ZeroOptions
from jaxdist.training.forward.module import ModuleForward, Scope
from jaxdist.training.forward.objective import count_labels
from jaxdist.training.task import Task

CROP = 8
"""A crop is shifted by up to this part of the image: 4 pixels of 32, as in He et al. 2016, section 4.2."""


class ClassifierForward(ModuleForward):
    """The forward pass of a classifier: rows whose label is negative do not count."""

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number of images that count."""
        return count_labels(batch)


class ImageTask(Task[Foreign]):
    """Batches of images and the numbers of their classes."""

    unit = "image"
    baseline_name = "entropy of the classes"

    def forward(self, dtype: DTypeLike) -> ClassifierForward:
        """Return the forward pass of the whole network."""
        scope: Scope = "batch" if self.config.model.all_rows_at_once else "rows"
        zero = ZeroOptions.of(self.split)
        return ClassifierForward(self.model, images.loss, self.layout, scope, dtype, zero)

    @cached_property
    def data(self) -> Images:
        """Both parts of the data. Raises `RequestError` for images that the model does not take."""
        sizes = self.config.model
        found = open_images(self.config.data, size=sizes.image, classes=sizes.classes, progress=self.progress)
        channels = found.train.shape[-1]
        if channels != sizes.channels:
            raise RequestError(
                f"the images of {self.config.data.path or 'digits'} have {counted(channels, 'channel')}, and "
                f"model.channels is {sizes.channels}; set it to {channels}"
            )
        return found

    def keep(self, path: Path) -> None:
        """Do nothing: other images are read without anything of the run's own data."""

    def available(self) -> tuple[int, str]:
        """Return (number of images to train on, what they are called)."""
        return self.data.train.rows, "images"

    @property
    def validation_rows(self) -> int:
        """The number of held-out images."""
        return self.data.validation.rows

    def baseline(self) -> float:
        """Return the nats per image of a guess that knows how frequent each class is."""
        share = np.bincount(self.data.validation.labels) / self.data.validation.rows
        return float(-np.sum(share[share > 0] * np.log(share[share > 0])))

    @property
    def augment(self) -> Augment | None:
        """What every step does to the images of its own rows; None where `data.augment` is "none".

        Images are shifted by at most 1/8 of their width, at least one pixel, as is usual for CIFAR (4 of 32 pixels).
        """
        augment = self.config.data.augment
        if augment == "none":
            return None
        pad = max(1, self.config.model.image // CROP)
        return Augment(self.config.train.seed, pad=pad, flip=augment == "crop-flip")

    def batch(self, rows: np.ndarray, step: int) -> Batch:
        """Return these rows, cropped and mirrored as in this step alone."""
        return image_batch(self.data.train, rows, self.batch_layout, self.augment, step)

    def abstract(self, rows: int, batch_layout: BatchLayout) -> AbstractBatch:
        """Return shapes and shardings of a batch of that many images.

        Images are float32 [k, rows / k, H, W, C], and labels int32.
        """
        sizes = self.config.model
        shape = (sizes.image, sizes.image, sizes.channels)
        return abstract_image_batch(rows, shape, batch_layout)

    def held_out(self, rows: np.ndarray, batch_layout: BatchLayout) -> Batch:
        """Return these held-out images; a row of -1 does not count."""
        return image_batch(self.data.validation, rows, batch_layout)
