"""Labelled images to classify: opened, checked, split, and normalised by what is trained on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from jaxtyping import Float, Float32, Int, Int32, Shaped

from jaxdist.config import DataConfig, DataLost, RequestError
from jaxdist.data.batches import splitmix64
from jaxdist.data.image_files import Labelled, read, renumber
from jaxdist.data.progress import Pass, Progress, unseen

VERSION = 1
"""Of the split and the normalisation; count it up when the same data would give other batches."""

CHUNK = 1 << 24
"""Bytes looked at together where all images are read."""


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of an array of images, which may be mapped from a file and is read a row at a time."""

    images: Shaped[np.ndarray, "all H W C"]
    index: Int[np.ndarray, " n"]
    """Which of `images` are the rows of this part."""
    labels: Int32[np.ndarray, " n"]
    mean: Float32[np.ndarray, " C"]
    std: Float32[np.ndarray, " C"]

    @property
    def rows(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, int, int]:
        """H, W, C of an image."""
        return self.images.shape[1:]

    def read(self, rows: Int[np.ndarray, " b"]) -> Float32[np.ndarray, "b H W C"]:
        """These rows, normalised: (image - mean) / std."""
        assert rows.size == 0 or 0 <= rows.min() <= rows.max() < self.rows, "row outside the images"
        check_length(self.images)
        out = self.images[self.index[rows]].astype(np.float32)
        out -= self.mean
        out /= self.std
        return out


@dataclass(frozen=True, eq=False)
class Images:
    """Images to train on and images held out, normalised alike."""

    train: Part
    validation: Part
    classes: tuple[str, ...]
    """The name of each label."""
    mean: Float32[np.ndarray, " C"]
    """Of each channel of the training images, in the units they are stored in."""
    std: Float32[np.ndarray, " C"]
    """Of each channel of the training images; 1 where a channel has one value throughout."""
    fingerprint: str
    """Hex; changes with the content of images, labels and classes and with the split: a resume must find the same."""
    source: str
    """One line for people."""


def open_images(config: DataConfig, size: int = 0, classes: int = 0, progress: Progress = unseen) -> Images:
    """The images that `config` asks for: `path` is of a form that `image_files.FORMS` tells; None: 1797 digits of 8x8.

    `size`: stretch the images of class folders to size x size pixels; 0 leaves them as they are. `classes`: how many,
    where labels are numbers; 0 counts them. The held-out part is `validation_path`, or what `path` brings along, or
    else the rows that a fixed hash of their number picks, `validation_fraction` of them on average.
    Raises `RequestError` for what is wrong with the request or the data; all of it is looked at once, here.
    """
    train, held_out = _read_parts(config, size, progress)
    parts = [part for part in (train, held_out) if part]
    if problems := [problem for part in parts for problem in _form_problems(part)]:
        raise RequestError(*problems)
    parts = [replace(p, images=p.images[..., None] if p.images.ndim == 3 else p.images) for p in parts]
    names = parts[0].names or _count_classes(parts[0], classes)
    if problems := _together_problems(parts, names, size, classes):
        raise RequestError(*problems)
    labels = [(renumber(p.labels, p.names, names) if p.names else p.labels).astype(np.int32) for p in parts]

    digest = hashlib.sha256(json.dumps([VERSION, names, held_out is None and config.validation_fraction]).encode())
    for part, numbers in zip(parts, labels, strict=True):
        _scan(part, numbers, digest, progress)

    rows = [np.arange(len(part.labels)) for part in parts]
    if held_out is None:
        chosen = _held_out(rows[0], config.validation_fraction)
        parts, labels, rows = parts * 2, labels * 2, [rows[0][~chosen], rows[0][chosen]]
    _check_split(parts[0], labels[0][rows[0]], rows[1], names, config)
    mean, std = _statistics(parts[0], rows[0])
    made = [Part(p.images, i, n[i], mean, std) for p, n, i in zip(parts, labels, rows, strict=True)]
    height, width, channels = made[0].shape
    source = (
        f"{parts[0].place}, {made[0].rows} images of {height}x{width}x{channels} and {made[1].rows} held out, "
        f"{len(names)} classes"
    )
    return Images(*made, names, mean, std, digest.hexdigest(), source)


def check_length(images: np.ndarray) -> None:
    """Raise `DataLost` where the file that these are mapped from is shorter now: reading on would be SIGBUS."""
    if not isinstance(images, np.memmap) or images.filename is None:
        return
    needed = images.offset + images.nbytes
    try:
        found = os.path.getsize(images.filename)
    except OSError:
        return  # it was removed: what is mapped stays
    if found < needed:
        raise DataLost(
            f"'{images.filename}' was cut while it was read: it has {found} bytes and had {needed} when it was opened; "
            f"put it back"
        )


def _read_parts(config: DataConfig, size: int, progress: Progress) -> tuple[Labelled, Labelled | None]:
    """The training images and the held-out ones, from wherever those come; None: they have to be chosen."""
    problems = []
    if config.tokenizer:
        problems.append(f"data.tokenizer is '{config.tokenizer}', but images need none; leave it out")
    if config.validation_path and not config.path:
        problems.append(
            f"data.validation_path is '{config.validation_path}' but data.path is not set; set data.path to images of "
            "the same kind, or leave out data.validation_path to hold out a part of the digits"
        )
    paths = [path for path in (config.path, config.validation_path) if path]
    if len(paths) == 2 and all(path.exists() for path in paths) and os.path.samefile(*paths):
        problems.append(
            f"data.path and data.validation_path are the same, '{config.path}'; leave out data.validation_path to hold "
            "out a part of it"
        )
    if problems:
        raise RequestError(*problems)
    found, problems = [], []
    for path in paths or [None]:
        try:
            found.append(read(path, size, progress))
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(*problems)
    (train, own), *other = found
    if other and (own or other[0][1]):
        whose = config.path if own else config.validation_path
        raise RequestError(
            f"'{whose}' has a held-out part of its own, and data.validation_path is '{config.validation_path}'; leave "
            "out one of them"
        )
    return train, other[0][0] if other else own


def _form_problems(part: Labelled) -> list[str]:
    """What is wrong with the type, the shape and the length of images and labels."""
    images, labels, place, problems = part.images, part.labels, part.place, []
    shape = " x ".join(map(str, images.shape))
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        problems.append(f"the images of {place} are {images.dtype}; save them as uint8 or as a float type")
    if images.ndim not in (3, 4):
        problems.append(f"the images of {place} have {images.ndim} dims ({shape}); they need 4, [n, H, W, C], or 3")
    elif 0 in images.shape:
        problems.append(f"{place} has no images (its array is {shape}); give some")
    elif images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[2] == images.shape[3] > 4:
        problems.append(
            f"the images of {place} are {shape}, which looks like channels first; save them as [n, H, W, C] "
            "(images.transpose(0, 2, 3, 1))"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        problems.append(f"the labels of {place} are {labels.dtype}; save them as whole numbers, such as int32")
    if labels.ndim != 1:
        problems.append(f"the labels of {place} have {labels.ndim} dims {labels.shape}; they need 1, a number an image")
    elif images.ndim and len(labels) != len(images):
        problems.append(f"{place} has {len(images)} images and {len(labels)} labels; give a label for each image")
    return problems


def _count_classes(part: Labelled, classes: int) -> tuple[str, ...]:
    """Numbers for names: as many as told, or else as there are; then each must occur."""
    found = np.unique(part.labels)
    count = classes or len(found)
    if count > 1 and (found[0] < 0 or found[-1] >= count):  # a single class is another mistake
        row = int(np.flatnonzero((part.labels < 0) | (part.labels >= count))[0])
        remedy = "" if classes else ", without gaps, or set model.classes"
        raise RequestError(
            f"label {int(part.labels[row])} of image {row} of {part.place} is out of range for {count} classes; "
            f"number the classes from 0 to {count - 1}{remedy}"
        )
    return tuple(map(str, range(count)))


def _together_problems(parts: list[Labelled], names: tuple[str, ...], size: int, classes: int) -> list[str]:
    """What does not fit together: the two parts, and what was asked for."""
    train, problems = parts[0], []
    if classes and classes != len(names):
        problems.append(
            f"{train.place} has {len(names)} classes, and model.classes is {classes}; set it to {len(names)}"
        )
    if len(names) < 2:
        problems.append(f"{train.place} has {len(names)} class; give images of at least 2")
    height, width = train.images.shape[1:3]
    if size and (height, width) != (size, size):
        problems.append(
            f"the images of {train.place} are {height}x{width}, and model.image is {size}; only images in class "
            f"folders are scaled: resize the arrays, or set model.image to {height} if they are square"
        )
    for other in parts[1:]:
        kind = lambda part: f"{'x'.join(map(str, part.images.shape[1:]))} of {part.images.dtype}"
        if kind(other) != kind(train):
            problems.append(
                f"the images of {train.place} are {kind(train)} and those of {other.place} are {kind(other)}; make "
                "them alike"
            )
        if bool(other.names) != bool(train.names):
            problems.append(f"one of {train.place} and {other.place} names its classes; give two of one kind")
        elif unknown := [name for name in other.names if name not in names]:
            problems.append(f"{other.place} has a class '{unknown[0]}' that {train.place} lacks; remove or rename it")
        elif not other.names and not 0 <= (wrong := _extreme(other.labels, len(names))) < len(names):
            problems.append(
                f"label {wrong} of {other.place} is out of range for the {len(names)} classes of "
                f"{train.place}; use 0 to {len(names) - 1}"
            )
    return problems


def _extreme(labels: Int[np.ndarray, " n"], count: int) -> int:
    """The largest label, or the smallest if that is not right."""
    return int(labels.max()) if labels.min() >= 0 else int(labels.min())


def _held_out(rows: Int[np.ndarray, " n"], fraction: float) -> np.ndarray:
    """Whether each row is held out: by its number alone, so the same on every machine."""
    return splitmix64(rows.astype(np.uint64)) < np.uint64(int(fraction * 2**64))


def _check_split(
    part: Labelled, labels: np.ndarray, held_out: np.ndarray, names: tuple[str, ...], config: DataConfig
) -> None:
    """Both parts must have something to say; `labels` are those to train on, `held_out` the rows that are not."""
    problems = []
    if not len(held_out):
        problems.append(
            f"no image of the {len(part.labels)} of {part.place} is held out by data.validation_fraction "
            f"{config.validation_fraction}; raise it, or give data.validation_path"
        )
    if (trained := len(np.unique(labels))) < 2:
        problems.append(
            f"the {len(labels)} images to train on of {part.place} are of {trained} of the {len(names)} classes; give "
            "more images, or lower data.validation_fraction"
        )
    if problems:
        raise RequestError(*problems)


def _chunks(images: np.ndarray, rows: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """All images, or those rows, some at a time."""
    count = max(1, CHUNK // images[0].nbytes)
    for start in range(0, len(images) if rows is None else len(rows), count):
        check_length(images)
        yield images[start : start + count] if rows is None else images[rows[start : start + count]]


def _scan(part: Labelled, labels: Int32[np.ndarray, " n"], digest, progress: Progress) -> None:
    """One pass over all content: into the digest, and refused where it is not a number that float32 holds."""
    digest.update(json.dumps([part.images.dtype.str, *part.images.shape]).encode() + labels.astype("<i4").tobytes())
    seen, scanning = 0, Pass(progress, "checking the images", part.images.nbytes)
    for chunk in _chunks(part.images):
        scanning.read(chunk.nbytes)
        digest.update(np.ascontiguousarray(chunk).view(np.uint8))
        with np.errstate(over="ignore"):
            good = np.isfinite(chunk.astype(np.float32, copy=False)).all((1, 2, 3)) if chunk.dtype != np.uint8 else True
        if not np.all(good):
            row = seen + int(np.argmin(good))
            raise RequestError(f"image {row} of {part.place} has values that are not finite in float32; repair it")
        seen += len(chunk)


def _statistics(part: Labelled, rows: Int[np.ndarray, " n"]) -> tuple[Float[np.ndarray, " C"], Float[np.ndarray, " C"]]:
    """Mean and standard deviation of each channel over these rows, in two passes of float64, rounded to float32."""
    channels = part.images.shape[-1]
    count = len(rows) * part.images[0].size // channels

    def average(of) -> np.ndarray:
        pixels = (chunk.reshape(-1, channels).astype(np.float64) for chunk in _chunks(part.images, rows))
        return reduce(np.add, (of(p).sum(0) for p in pixels)) / count

    mean = average(lambda pixels: pixels)
    std = np.sqrt(average(lambda pixels: (pixels - mean) ** 2)).astype(np.float32)
    if not std.any():
        raise RequestError(f"every image to train on of {part.place} is the same single colour; give other images")
    return mean.astype(np.float32), np.where(std > 0, std, np.float32(1))
