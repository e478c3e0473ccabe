"""Open, check and split labelled images, and normalise them by the statistics of the training images."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, Int, Int32, Shaped

from jaxdist.config import DataConfig, DataLost, RequestError
from jaxdist.data.images.files import Labelled, read, renumber
from jaxdist.data.order import splitmix64
from jaxdist.data.progress import Pass, Progress, unseen

VERSION = 1
"""Version of the split and the normalisation; increase it when the same data would give other batches."""

CHUNK = 1 << 24
"""Bytes processed at a time when all images are read."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of an array of images, which may be memory-mapped and is read a row at a time."""

    images: Shaped[np.ndarray, "all H W C"]
    index: Int[np.ndarray, " n"]
    """The rows of `images` that belong to this part."""
    labels: Int32[np.ndarray, " n"]
    mean: Float32[np.ndarray, " C"]
    std: Float32[np.ndarray, " C"]

    @property
    def rows(self) -> int:
        """Number of images."""
        return len(self.index)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (H, W, C) of an image."""
        return self.images.shape[1:]

    def read(self, rows: Int[np.ndarray, " b"]) -> Float32[np.ndarray, "b H W C"]:
        """Return these rows, normalised: (image - mean) / std."""
        assert rows.size == 0 or 0 <= rows.min() <= rows.max() < self.rows, "row outside the images"
        check_length(self.images)
        out = self.images[self.index[rows]].astype(np.float32)
        # In place, because a batch of images is large.
        out -= self.mean
        out /= self.std
        return out


@dataclass(frozen=True, eq=False)
class Images:
    """Training images and held-out images, normalised alike."""

    train: Part
    validation: Part
    classes: tuple[str, ...]
    """The name of each label."""
    mean: Float32[np.ndarray, " C"]
    """Mean of each channel of the training images, in the units in which they are stored."""
    std: Float32[np.ndarray, " C"]
    """Standard deviation of each channel of the training images; 1 for a channel that is constant."""
    fingerprint: str
    """Hexadecimal hash of images, labels, classes and the split. A resumed run must find the same one."""
    source: str
    """One line that describes the data to the user."""


def open_images(config: DataConfig, size: int = 0, classes: int = 0, progress: Progress = unseen) -> Images:
    """Return the images that `config` asks for.

    `path` has one of the forms in `images.files.FORMS`; without it the images are 1797 digits of 8x8 pixels. Images in
    class folders are stretched to `size` x `size` pixels; 0 leaves them as they are. `classes` is the number of classes
    if labels are numbers; 0 counts them. The held-out part is `validation_path`, or the one that `path` contains, or
    else `validation_fraction` of the rows on average, chosen by a fixed hash of the row number.
    Raises `RequestError` for anything wrong with the request or the data, all of which is read once, here.
    """
    train, held_out = _read_parts(config, size, progress)
    parts = [train]
    if held_out is not None:
        parts.append(held_out)
    problems = [problem for part in parts for problem in _form_problems(part)]
    if problems:
        raise RequestError(*problems)
    parts = [_with_channels(part) for part in parts]
    names = parts[0].names or _count_classes(parts[0], classes)
    problems = _together_problems(parts, names, size, classes)
    if problems:
        raise RequestError(*problems)
    labels = [_numbered(part, names) for part in parts]

    # The fraction counts only if it determines the split.
    digest = hashlib.sha256(json.dumps([VERSION, names, held_out is None and config.validation_fraction]).encode())
    for part, numbers in zip(parts, labels, strict=True):
        _scan(part, numbers, digest, progress)

    rows = [np.arange(len(part.labels)) for part in parts]
    if held_out is None:
        chosen = _held_out(rows[0], config.validation_fraction)
        # Both parts read the same array, at different rows.
        parts = parts * 2
        labels = labels * 2
        rows = [rows[0][~chosen], rows[0][chosen]]
    _check_split(parts[0], labels[0][rows[0]], rows[1], names, config)
    mean, std = _statistics(parts[0], rows[0])
    training, validation = (
        Part(part.images, index, numbers[index], mean, std)
        for part, numbers, index in zip(parts, labels, rows, strict=True)
    )
    height, width, channels = training.shape
    source = (
        f"{parts[0].place}, {training.rows} images of {height}x{width}x{channels} and {validation.rows} held out, "
        f"{len(names)} classes"
    )
    return Images(training, validation, names, mean, std, digest.hexdigest(), source)


def _with_channels(part: Labelled) -> Labelled:
    """Add the dim of channels to images that have none."""
    if part.images.ndim == 4:
        return part
    return replace(part, images=part.images[..., None])


def _numbered(part: Labelled, names: tuple[str, ...]) -> Int32[np.ndarray, " n"]:
    """Return the labels as indices of `names`."""
    labels = part.labels
    if part.names:
        labels = renumber(labels, part.names, names)
    return labels.astype(np.int32)


def check_length(images: np.ndarray) -> None:
    """Raise `DataLost` if the file that the images are mapped from is shorter now; reading them would be a SIGBUS."""
    if not isinstance(images, np.memmap) or images.filename is None:
        return
    needed = images.offset + images.nbytes
    try:
        size = os.path.getsize(images.filename)
    except OSError:
        # The file was removed, but its mapping remains valid.
        return
    if size < needed:
        raise DataLost(
            f"'{images.filename}' was truncated while it was read: it has {size} bytes and had {needed} when it was "
            f"opened; put it back"
        )


def _read_parts(config: DataConfig, size: int, progress: Progress) -> tuple[Labelled, Labelled | None]:
    """Return the training images and the held-out images; None if the latter have to be chosen from the former."""
    problems = []
    if config.tokenizer:
        problems.append(f"data.tokenizer is '{config.tokenizer}', but images need none; leave it out")
    if config.validation_path and not config.path:
        problems.append(
            f"data.validation_path is '{config.validation_path}' but data.path is not set; set data.path to images of "
            "the same kind, or leave out data.validation_path to hold out a part of the digits"
        )
    paths = [Path(path) for path in (config.path, config.validation_path) if path]
    if len(paths) == 2 and all(path.exists() for path in paths) and os.path.samefile(*paths):
        problems.append(
            f"data.path and data.validation_path are the same, '{config.path}'; leave out data.validation_path to hold "
            "out a part of it"
        )
    if problems:
        raise RequestError(*problems)
    sources = []
    # Without a path they are the digits of scikit-learn.
    to_read: Sequence[Path | None] = paths or [None]
    for path in to_read:
        try:
            sources.append(read(path, size, progress))
        except RequestError as error:
            problems += error.problems
    if problems:
        raise RequestError(*problems)
    train, own = sources[0]
    if len(sources) == 1:
        return train, own
    validation, own_of_validation = sources[1]
    if own or own_of_validation:
        whose = config.path if own else config.validation_path
        raise RequestError(
            f"'{whose}' has a held-out part of its own, and data.validation_path is '{config.validation_path}'; leave "
            "out one of them"
        )
    return train, validation


def _form_problems(part: Labelled) -> list[str]:
    """Return what is wrong with the dtype, the shape and the length of images and labels."""
    images = part.images
    labels = part.labels
    place = part.place
    problems = []
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
    """Return numbers as names of the classes: `classes` of them, or, if 0, as many as there are different labels.

    In the latter case each number must occur. Raises `RequestError` for labels out of range.
    """
    values = np.unique(part.labels)
    count = classes or len(values)
    # A single class is an error of its own, which is reported later.
    if count > 1 and (values[0] < 0 or values[-1] >= count):
        row = int(np.flatnonzero((part.labels < 0) | (part.labels >= count))[0])
        remedy = "" if classes else ", without gaps, or set model.classes"
        raise RequestError(
            f"label {int(part.labels[row])} of image {row} of {part.place} is out of range for {count} classes; "
            f"number the classes from 0 to {count - 1}{remedy}"
        )
    return tuple(str(number) for number in range(count))


def _together_problems(parts: list[Labelled], names: tuple[str, ...], size: int, classes: int) -> list[str]:
    """Return what does not match: the two parts with each other, or the data with the requested sizes."""
    train = parts[0]
    problems = []
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
        if _kind(other) != _kind(train):
            problems.append(
                f"the images of {train.place} are {_kind(train)} and those of {other.place} are {_kind(other)}; make "
                "them alike"
            )
        if bool(other.names) != bool(train.names):
            problems.append(f"one of {train.place} and {other.place} names its classes; give two of one kind")
        elif other.names:
            unknown = [name for name in other.names if name not in names]
            if unknown:
                problems.append(
                    f"{other.place} has a class '{unknown[0]}' that {train.place} lacks; remove or rename it"
                )
        else:
            label = int(other.labels.max()) if other.labels.min() >= 0 else int(other.labels.min())
            if not 0 <= label < len(names):
                problems.append(
                    f"label {label} of {other.place} is out of range for the {len(names)} classes of "
                    f"{train.place}; use 0 to {len(names) - 1}"
                )
    return problems


def _kind(part: Labelled) -> str:
    """Return the shape and dtype of an image: `8x8x1 of uint8`."""
    shape = "x".join(str(size) for size in part.images.shape[1:])
    return f"{shape} of {part.images.dtype}"


def _held_out(rows: Int[np.ndarray, " n"], fraction: float) -> np.ndarray:
    """Return whether each row is held out. It depends on its number alone, so it is the same on every machine."""
    return splitmix64(rows.astype(np.uint64)) < np.uint64(int(fraction * 2**64))


def _check_split(
    part: Labelled, labels: np.ndarray, held_out: np.ndarray, names: tuple[str, ...], config: DataConfig
) -> None:
    """Raise `RequestError` unless some images are held out and the others have at least two classes.

    `labels` are the training labels, `held_out` the rows that are held out.
    """
    problems = []
    if not len(held_out):
        problems.append(
            f"no image of the {len(part.labels)} of {part.place} is held out by data.validation_fraction "
            f"{config.validation_fraction}; raise it, or give data.validation_path"
        )
    trained = len(np.unique(labels))
    if trained < 2:
        problems.append(
            f"the {len(labels)} images to train on of {part.place} are of {trained} of the {len(names)} classes; give "
            "more images, or lower data.validation_fraction"
        )
    if problems:
        raise RequestError(*problems)


def _chunks(images: np.ndarray, rows: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Yield all images, or the given rows, in chunks of about `CHUNK` bytes."""
    count = max(1, CHUNK // images[0].nbytes)
    total = len(images) if rows is None else len(rows)
    for start in range(0, total, count):
        check_length(images)
        if rows is None:
            yield images[start : start + count]
        else:
            yield images[rows[start : start + count]]


def _scan(part: Labelled, labels: Int32[np.ndarray, " n"], digest: hashlib._Hash, progress: Progress) -> None:
    """Add all content to the digest in one pass. Raises `RequestError` for values that float32 cannot hold."""
    digest.update(json.dumps([part.images.dtype.str, *part.images.shape]).encode() + labels.astype("<i4").tobytes())
    scanning = Pass(progress, "checking the images", part.images.nbytes)
    first_row = 0
    for chunk in _chunks(part.images):
        scanning.read(chunk.nbytes)
        digest.update(np.ascontiguousarray(chunk).view(np.uint8).data)
        if chunk.dtype != np.uint8:
            # A float64 that is too large becomes infinity in float32, which is found below.
            with np.errstate(over="ignore"):
                finite = np.isfinite(chunk.astype(np.float32, copy=False)).all((1, 2, 3))
            if not np.all(finite):
                row = first_row + int(np.argmin(finite))
                raise RequestError(f"image {row} of {part.place} has values that are not finite in float32; repair it")
        first_row += len(chunk)


def _statistics(part: Labelled, rows: Int[np.ndarray, " n"]) -> tuple[Float[np.ndarray, " C"], Float[np.ndarray, " C"]]:
    """Return mean and standard deviation of each channel over these rows, rounded to float32.

    Two passes in float64: the mean first, then the mean squared difference from it.
    """
    channels = part.images.shape[-1]
    count = len(rows) * part.images[0].size // channels

    def pixels() -> Iterator[Float[np.ndarray, "pixels C"]]:
        for chunk in _chunks(part.images, rows):
            yield chunk.reshape(-1, channels).astype(np.float64)

    mean = reduce(np.add, (chunk.sum(0) for chunk in pixels())) / count
    variance = reduce(np.add, (((chunk - mean) ** 2).sum(0) for chunk in pixels())) / count
    std = np.sqrt(variance).astype(np.float32)
    if not std.any():
        raise RequestError(f"every image to train on of {part.place} is the same single colour; give other images")
    return mean.astype(np.float32), np.where(std > 0, std, np.float32(1))
