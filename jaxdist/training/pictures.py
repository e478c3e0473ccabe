"""What there is to learn in labelled images: their classes, by a network that knows nothing of meshes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxdist.config import Config, RequestError
from jaxdist.data.batches import Batch
from jaxdist.data.image_batches import Augment, abstract_image_batch, image_batch, image_validation_batches
from jaxdist.data.images import Images, open_images
from jaxdist.models import images
from jaxdist.models.foreign import Foreign
from jaxdist.sharding import Layout
from jaxdist.training.whole import Whole

CROP = 8
"""A crop is shifted by up to this part of the image: 4 pixels of 32, as He et al. 2016, section 4.2, have it."""


class Classifier(Whole):
    """Rows whose label is negative do not count."""

    def count(self, batch: Batch) -> Int[Array, ""]:
        return jnp.sum(batch["labels"] >= 0)


class Pictures:
    """A `Task`: batches of images and labels, and the forward pass that makes a loss of them."""

    unit = "image"
    units = 1
    baseline_name = "entropy of the classes"
    tokenizer = None
    flops = None
    """Nobody has counted them."""
    kept = ""

    def __init__(self, config: Config, model: Foreign, mesh: jax.sharding.Mesh, layout: Layout):
        self.config, self.model, self.mesh, self.layout = config, model, mesh, layout
        sizes = config.model
        self.shape = sizes.image, sizes.image, sizes.channels
        kind, seed = config.data.augment, config.train.seed
        crop = Augment(seed, pad=max(1, sizes.image // CROP), flip=kind == "crop-flip")
        self.augment = None if kind == "none" else crop

    def forward(self, dtype: Any) -> Classifier:
        scope, stage = images.scope(self.config.model), self.config.parallel.zero
        return Classifier(self.model, images.loss, self.layout, scope, dtype, stage)

    @cached_property
    def images(self) -> Images:
        """Raises `RequestError` for images that the model does not take."""
        sizes = self.config.model
        found = open_images(self.config.data, size=sizes.image, classes=sizes.classes)
        if found.train.shape[-1] != sizes.channels:
            raise RequestError(
                f"the images of {self.config.data.path or 'digits'} have {found.train.shape[-1]} channel(s), and "
                f"model.channels is {sizes.channels}; set it to {found.train.shape[-1]}"
            )
        return found

    def keep(self, path: Path) -> None:
        """Nothing of a run's own data is needed to look at others."""

    @property
    def source(self) -> str:
        return self.images.source

    @property
    def fingerprint(self) -> str:
        return self.images.fingerprint

    @cached_property
    def rows(self) -> int:
        """Raises `RequestError` where they are fewer than one batch."""
        rows, batch = self.images.train.rows, self.config.train.global_batch_size
        if rows < batch:
            raise RequestError(
                f"there are {rows} images to train on, fewer than one global batch of {batch}; "
                f"lower train.global_batch_size, or give more images"
            )
        return rows

    def baseline(self) -> float:
        """Nats per image of one who knows how frequent each class is, and has not looked."""
        share = np.bincount(self.images.validation.labels) / self.images.validation.rows
        return float(-np.sum(share[share > 0] * np.log(share[share > 0])))

    def batch(self, rows: np.ndarray, step: int) -> Batch:
        """`rows` of the training part, cropped and mirrored as in this step alone."""
        k = self.config.train.accumulation
        return image_batch(self.images.train, rows, k, self.mesh, self.layout, self.augment, step)

    def abstract_batch(self) -> Batch:
        train = self.config.train
        return abstract_image_batch(train.global_batch_size, self.shape, train.accumulation, self.mesh, self.layout)

    def validation_batches(self, rows: int, limit: int) -> Iterator[Batch]:
        return image_validation_batches(self.images.validation, rows, limit, self.mesh, self.layout)
