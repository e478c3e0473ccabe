"""Read labelled images from an .npz, two .npy files, a folder for each class, or the digits of scikit-learn."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int, Shaped

from jaxdist.config import RequestError, listed, nearest
from jaxdist.data.progress import Pass, Progress, unseen

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

TRAINING_ARRAYS = ("images", "labels")
VALIDATION_ARRAYS = ("validation_images", "validation_labels")
"""Optional arrays of the held-out part."""

ARRAYS = (*TRAINING_ARRAYS, *VALIDATION_ARRAYS)
"""The keys of an .npz, and the names of the .npy files in a folder."""

TRAIN = "train"
"""Sub-folder of the training images, in a folder that keeps its held-out images separately."""

VALIDATION = ("validation", "val")
"""Possible names of the sub-folder of held-out images beside `TRAIN`."""

FORMS = (
    "an .npz with images and labels, a folder with images.npy and labels.npy, or a folder that has a sub-folder of "
    "images for each class"
)

GREY = ("1", "L", "LA")
"""Pillow's modes without colour."""

SHALLOW = (*GREY, "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Pillow's modes with at most 8 bits per channel."""


@dataclass(frozen=True)
class Labelled:
    """Images and labels as they were read, not checked yet."""

    images: Shaped[np.ndarray, "n H W *C"]
    labels: Shaped[np.ndarray, " n"]
    names: tuple[str, ...]
    """Names of the classes; empty if the labels are numbers without names."""
    place: str
    """Where they come from, as messages say it."""


def read(path: Path | None, size: int, progress: Progress = unseen) -> tuple[Labelled, Labelled | None]:
    """Return the images at `path`, and their held-out part if `path` contains one.

    `.npy` files are memory-mapped; everything else is held in memory. Images in class folders are decoded, as one grey
    channel if all of them are grey, otherwise as RGB without transparency, and stretched to `size` x `size` pixels
    unless that is 0. Hidden files are skipped. `progress` is called with the bytes that are decoded.
    Raises `RequestError` for anything that cannot be read.
    """
    if path is None:
        return _digits(), None
    if not path.exists():
        raise RequestError(f"'{path}' does not exist; give {FORMS}")
    if path.is_dir():
        with _reading(path):
            arrays = {file.stem: file for file in sorted(path.glob("*.npy")) if not file.name.startswith(".")}
        if arrays:

            def load_mapped(name: str) -> np.ndarray:
                return np.load(arrays[name], "r", allow_pickle=False)

            return _arrays(path, sorted(arrays), load_mapped)
        return _class_folders(path, size, progress)
    if path.suffix.lower() != ".npz":
        raise RequestError(f"'{path}' is not image data; give {FORMS}")
    with _reading(path):
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise RequestError(f"'{path}' holds one array without a name; save it with numpy.savez(images=, labels=)")
        with loaded:
            return _arrays(path, loaded.files, loaded.__getitem__)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn the errors of reading `path` into `RequestError`."""
    try:
        yield
    except (OSError, ValueError, EOFError, SyntaxError, zipfile.BadZipFile, zlib.error) as error:
        # A RequestError is a ValueError too, and says already what is wrong.
        if isinstance(error, RequestError):
            raise
        reason = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        raise RequestError(f"'{path}' cannot be read ({reason}); make it readable, or create it again") from error


def _digits() -> Labelled:
    """Return the digits of scikit-learn: 1797 grey images of 8x8 pixels, 0 to 16 (Alpaydin and Kaynak 1998, UCI)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RequestError(
            "data.path is not set, and the digits that are used then come with scikit-learn, which is not installed; "
            f"install 'jaxdist[lab]', or set data.path to {FORMS}"
        ) from error
    digits = load_digits()
    names = tuple(str(name) for name in digits.target_names)
    return Labelled(digits.images.astype(np.uint8), digits.target, names, "scikit-learn's digits")


def _arrays(path: Path, found: Sequence[str], load: Callable[[str], np.ndarray]) -> tuple[Labelled, Labelled | None]:
    """Return the arrays of an .npz, or of the .npy files in a folder; `found` are their names."""
    unknown = [name for name in found if name not in ARRAYS]
    sentences = (f"'{path}' has '{name}'; {nearest(name, ARRAYS)}" for name in unknown)
    problems = list(listed(sentences, len(unknown), f"such names in '{path}'"))
    held_out = any(name in found for name in VALIDATION_ARRAYS)
    needed = ARRAYS if held_out else TRAINING_ARRAYS
    missing = [name for name in needed if name not in found]
    if missing:
        problems.append(f"'{path}' lacks {' and '.join(missing)}; it needs images [n, H, W, C] and labels [n]")
    if problems:
        raise RequestError(*problems)
    with _reading(path):
        values = {name: load(name) for name in found}
    training = Labelled(values["images"], values["labels"], (), f"'{path}'")
    if not held_out:
        return training, None
    place = f"the held-out part of '{path}'"
    return training, Labelled(values["validation_images"], values["validation_labels"], (), place)


def _class_folders(path: Path, size: int, progress: Progress) -> tuple[Labelled, Labelled | None]:
    """Return the images of a folder with a sub-folder for each class.

    The folder may instead hold `train`, and optionally `validation` or `val`, each with a sub-folder for each class.
    """
    names = [entry.name for entry in _entries(path) if entry.is_dir()]
    if TRAIN not in names:
        return _classes(path, size, progress), None
    held_out = [name for name in names if name in VALIDATION]
    others = [entry.name for entry in _entries(path) if entry.name not in (TRAIN, *VALIDATION)]
    if len(held_out) > 1 or others:
        both = " and ".join(f"'{name}'" for name in [TRAIN, *held_out, *others][:3])
        raise RequestError(
            f"'{path}' holds {both}; keep one of validation and val beside train and nothing else, or set data.path to "
            "the folder to train on and data.validation_path to the one to hold out"
        )
    held = _classes(path / held_out[0], size, progress) if held_out else None
    return _classes(path / TRAIN, size, progress), held


def _classes(path: Path, size: int, progress: Progress) -> Labelled:
    """Return the images of the sub-folders of `path`, one class each, numbered in the order of their names."""
    folders = _entries(path)
    stray = next((entry for entry in folders if not entry.is_dir()), None)
    if stray:
        others = any(entry.is_dir() for entry in folders)
        remedy = "remove it, or move it elsewhere" if others else f"give {FORMS}"
        raise RequestError(f"'{stray}' is not a folder, but each class needs a folder of its own; {remedy}")
    if not folders:
        raise RequestError(f"'{path}' is empty; give {FORMS}")
    files = [_entries(folder) for folder in folders]
    for folder, inside in zip(folders, files, strict=True):
        if not inside:
            raise RequestError(f"'{folder}' has no images; put the images of that class there, or remove it")
        deeper = next((entry for entry in inside if entry.is_dir()), None)
        if deeper:
            raise RequestError(f"'{deeper}' is a folder inside that of a class; put the images into '{folder}' itself")
    labels = np.repeat(np.arange(len(folders)), [len(inside) for inside in files])
    images = _decode([file for inside in files for file in inside], size, progress)
    return Labelled(images, labels, tuple(folder.name for folder in folders), f"'{path}'")


def _entries(path: Path) -> list[Path]:
    """Return the entries of a folder without hidden ones, in the same order on every system."""
    with _reading(path):
        visible = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    return sorted(visible, key=lambda entry: entry.name)


def _decode(files: Sequence[Path], size: int, progress: Progress) -> Shaped[np.ndarray, "n H W *C"]:
    """Return all images in uint8."""
    try:
        from PIL import Image
    except ImportError as error:
        raise RequestError(
            f"'{files[0]}' is an image file, and Pillow, which reads those, is not installed; install 'jaxdist[lab]'"
        ) from error
    sizes = [_size(file) for file in files]
    # The headers are read first, so that most errors are reported before the long work.
    (width, height), grey = _check_headers(Image, files, sizes, size, progress)
    shape: tuple[int, ...] = (len(files), height, width)
    if not grey:
        shape = (*shape, 3)
    out = np.empty(shape, np.uint8)
    decoding = Pass(progress, "decoding the images", sum(sizes))
    for row, file, count in zip(out, files, sizes, strict=True):
        decoding.read(count)
        with _open_image(Image, file) as image:
            plain = image.convert("L" if grey else "RGB")
            if size:
                plain = plain.resize((width, height), Image.Resampling.BILINEAR)
            row[:] = plain
    return out


def _check_headers(
    Image: ModuleType, files: Sequence[Path], sizes: Sequence[int], size: int, progress: Progress
) -> tuple[tuple[int, int], bool]:
    """Return the width and height of the decoded images, and whether all of them are grey.

    Raises `RequestError` for an image that cannot be used, or whose size differs from the others if `size` is 0.
    """
    looking = Pass(progress, "looking at the images", sum(sizes))
    first = None
    grey = True
    for file, count in zip(files, sizes, strict=True):
        looking.read(count)
        with _open_image(Image, file) as image:
            if image.mode not in SHALLOW:
                raise RequestError(
                    f"'{file}' has more than 8 bits for each channel (mode {image.mode}); save the images as float "
                    "arrays in an .npz"
                )
            grey = grey and image.mode in GREY
            if first is None:
                first = image.size
            if image.size != first and not size:
                raise RequestError(
                    f"'{files[0]}' has {first[0]}x{first[1]} pixels (width x height) and '{file}' has "
                    f"{image.size[0]}x{image.size[1]}; make them alike, or set model.image to the size that all are "
                    "stretched to"
                )
    if size:
        return (size, size), grey
    assert first is not None
    return first, grey


def _size(file: Path) -> int:
    with _reading(file):
        return file.stat().st_size


def _identify(Image: ModuleType, file: Path) -> Picture:
    """Open an image file without decoding it. Raises `RequestError` if it is not an image."""
    try:
        return Image.open(file)
    except Image.UnidentifiedImageError as error:
        raise RequestError(
            f"'{file}' is not an image that Pillow knows; remove it from the images, or create it again if it is one"
        ) from error


@contextmanager
def _open_image(Image: ModuleType, file: Path) -> Iterator[Picture]:
    """Open an image file, and turn errors of opening and of decoding it into `RequestError`."""
    try:
        with _reading(file), _identify(Image, file) as image:
            yield image
    except Image.DecompressionBombError as error:
        raise RequestError(f"'{file}' cannot be read ({error}); make it smaller") from error


def renumber(labels: Int[np.ndarray, " n"], names: Sequence[str], wanted: Sequence[str]) -> Int[np.ndarray, " n"]:
    """Return labels that index `names` as labels that index `wanted`, which contains all of these names."""
    return np.array([wanted.index(name) for name in names], np.int64)[labels]
