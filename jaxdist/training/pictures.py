"""What there is to learn in labelled images: their classes, by a network that knows nothing of meshes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxdist.config import RequestError
from jaxdist.data.batches import Batch
from jaxdist.data.image_batches import Augment, abstract_image_batch, image_batch, image_validation_batches
from jaxdist.data.images import Images, open_images
from jaxdist.models import images
from jaxdist.training.forward.module import ModuleForward
from jaxdist.training.task import Task

CROP = 8
"""A crop is shifted by up to this part of the image: 4 pixels of 32, as He et al. 2016, section 4.2, have it."""


class Classifier(ModuleForward):
    """Rows whose label is negative do not count."""

    def count(self, batch: Batch) -> Int[Array, ""]:
        return jnp.sum(batch["labels"] >= 0)


class ImageTask(Task):
    """Batches of images and the numbers of their classes."""

    unit = "image"
    baseline_name = "entropy of the classes"

    def forward(self, dtype: Any) -> Classifier:
        scope, stage = images.scope(self.config.model), self.config.parallel.zero
        return Classifier(self.model, images.loss, self.layout, scope, dtype, stage)

    @cached_property
    def data(self) -> Images:
        """Raises `RequestError` for images that the model does not take."""
        sizes = self.config.model
        found = open_images(self.config.data, size=sizes.image, classes=sizes.classes, progress=self.progress)
        if found.train.shape[-1] != sizes.channels:
            raise RequestError(
                f"the images of {self.config.data.path or 'digits'} have {found.train.shape[-1]} channel(s), and "
                f"model.channels is {sizes.channels}; set it to {found.train.shape[-1]}"
            )
        return found

    def keep(self, path: Path) -> None:
        """Nothing of a run's own data is needed to look at others."""

    def available(self) -> tuple[int, str]:
        return self.data.train.rows, "images"

    def baseline(self) -> float:
        """That of one who knows how frequent each class is."""
        share = np.bincount(self.data.validation.labels) / self.data.validation.rows
        return float(-np.sum(share[share > 0] * np.log(share[share > 0])))

    @property
    def augment(self) -> Augment | None:
        """What every step does to the images of its own rows."""
        if self.config.data.augment == "none":
            return None
        pad, flip = max(1, self.config.model.image // CROP), self.config.data.augment == "crop-flip"
        return Augment(self.config.train.seed, pad=pad, flip=flip)

    def batch(self, rows: np.ndarray, step: int) -> Batch:
        """Cropped and mirrored as in this step alone."""
        k, augment = self.micro_batches, self.augment
        return image_batch(self.data.train, rows, k, self.mesh, self.layout, augment, step)

    def abstract(self, rows: int, accumulation: int) -> Batch:
        sizes = self.config.model
        shape = sizes.image, sizes.image, sizes.channels
        return abstract_image_batch(rows, shape, accumulation, self.mesh, self.layout)

    def held_out(self, rows: int, limit: int, accumulation: int) -> Iterator[Batch]:
        return image_validation_batches(self.data.validation, rows, limit, accumulation, self.mesh, self.layout)
