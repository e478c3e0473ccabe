"""Labelled images as people keep them: an .npz, two .npy, a folder for each class, or the digits of scikit-learn."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int, Shaped

from jaxdist.config import RequestError, nearest
from jaxdist.data.progress import Pass, Progress, unseen

ARRAYS = ("images", "labels", "validation_images", "validation_labels")
"""The keys of an .npz, and the names of the .npy files in a folder; the last two may be missing."""

TRAIN, VALIDATION = "train", ("validation", "val")
"""Sub-folders of a folder of images that has its held-out part apart."""

FORMS = (
    "an .npz with images and labels, a folder with images.npy and labels.npy, or a folder that has a sub-folder of "
    "images for each class"
)

GREY, SHALLOW = ("1", "L", "LA"), ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Pillow's modes without colour, and those of at most 8 bits for each channel."""


@dataclass(frozen=True)
class Labelled:
    """Images and labels as they were found, not checked yet."""

    images: Shaped[np.ndarray, "n H W *C"]
    labels: Shaped[np.ndarray, " n"]
    names: tuple[str, ...]
    """Of the classes; empty where labels are only numbers."""
    place: str
    """For people."""


def read(path: Path | None, size: int, progress: Progress = unseen) -> tuple[Labelled, Labelled | None]:
    """What lies there, and its held-out part where it has one of its own.

    `.npy` files are mapped, all else is held in memory. Images in class folders are decoded, and stretched to `size` x
    `size` pixels where that is not 0: as one grey channel if all of them are grey, else as RGB; transparency is
    dropped. Hidden files are passed over. `progress` is told how many bytes of them are decoded.
    Raises `RequestError` for what cannot be read.
    """
    if path is None:
        return _digits(), None
    if not path.exists():
        raise RequestError(f"'{path}' does not exist; give {FORMS}")
    if path.is_dir():
        with _reading(path):
            arrays = {file.stem: file for file in sorted(path.glob("*.npy")) if not file.name.startswith(".")}
        if arrays:
            return _arrays(path, sorted(arrays), lambda name: np.load(arrays[name], "r", allow_pickle=False))
        return _class_folders(path, size, progress)
    if path.suffix.lower() != ".npz":
        raise RequestError(f"'{path}' is no image data; give {FORMS}")
    with _reading(path):
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise RequestError(f"'{path}' holds one array without a name; save it with numpy.savez(images=, labels=)")
        with loaded:
            return _arrays(path, loaded.files, loaded.__getitem__)


@contextmanager
def _reading(path: Path):
    try:
        yield
    except (OSError, ValueError, EOFError, SyntaxError, zipfile.BadZipFile, zlib.error) as error:
        if isinstance(error, RequestError):
            raise
        reason = str(getattr(error, "strerror", None) or error).partition("\n")[0]
        raise RequestError(f"'{path}' cannot be read ({reason}); make it readable, or make it anew") from error


def _digits() -> Labelled:
    """1797 grey digits of 8x8 pixels, 0 to 16, which scikit-learn brings with it (Alpaydin and Kaynak 1998, UCI)."""
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
    """The arrays of an .npz or of the .npy files in a folder."""
    problems = [f"'{path}' has '{name}'; {nearest(name, ARRAYS)}" for name in found if name not in ARRAYS]
    held_out = any(name in found for name in ARRAYS[2:])
    if missing := [name for name in ARRAYS[: 4 if held_out else 2] if name not in found]:
        problems.append(f"'{path}' lacks {' and '.join(missing)}; it needs images [n, H, W, C] and labels [n]")
    if problems:
        raise RequestError(*problems)
    with _reading(path):
        values = {name: load(name) for name in found}
    part = lambda images, labels, place: Labelled(values[images], values[labels], (), place)
    own = part(*ARRAYS[2:], f"the held-out part of '{path}'") if held_out else None
    return part(*ARRAYS[:2], f"'{path}'"), own


def _class_folders(path: Path, size: int, progress: Progress) -> tuple[Labelled, Labelled | None]:
    """A folder with a sub-folder for each class, or with `train` and maybe `validation` or `val` above those."""
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
    """A class for each sub-folder, numbered in the order of their names."""
    folders = _entries(path)
    if stray := next((entry for entry in folders if not entry.is_dir()), None):
        others = any(entry.is_dir() for entry in folders)
        remedy = "remove it, or move it elsewhere" if others else f"give {FORMS}"
        raise RequestError(f"'{stray}' lies beside or in place of folders of a class each; {remedy}")
    if not folders:
        raise RequestError(f"'{path}' is empty; give {FORMS}")
    files = [_entries(folder) for folder in folders]
    for folder, inside in zip(folders, files, strict=True):
        if not inside:
            raise RequestError(f"'{folder}' has no images; put the images of that class there, or remove it")
        if deeper := next((entry for entry in inside if entry.is_dir()), None):
            raise RequestError(f"'{deeper}' is a folder inside that of a class; put the images into '{folder}' itself")
    labels = np.repeat(np.arange(len(folders)), [len(inside) for inside in files])
    images = _decode([file for inside in files for file in inside], size, progress)
    return Labelled(images, labels, tuple(folder.name for folder in folders), f"'{path}'")


def _entries(path: Path) -> list[Path]:
    """What lies in a folder, hidden files aside, in the same order on every system."""
    with _reading(path):
        return sorted((entry for entry in path.iterdir() if not entry.name.startswith(".")), key=lambda e: e.name)


def _decode(files: Sequence[Path], size: int, progress: Progress) -> Shaped[np.ndarray, "n H W *C"]:
    """All images in uint8. Their headers are read first, so that most mistakes are told before the long work."""
    try:
        from PIL import Image
    except ImportError as error:
        raise RequestError(
            f"'{files[0]}' is an image file, and Pillow, which reads those, is not installed; install 'jaxdist[lab]'"
        ) from error
    first, grey = None, True
    sizes = [_size(file) for file in files]
    looking = Pass(progress, "looking at the images", sum(sizes))
    for file, count in zip(files, sizes, strict=True):
        looking.read(count)
        with _picture(Image, file) as image:
            if image.mode not in SHALLOW:
                raise RequestError(
                    f"'{file}' has more than 8 bits for each channel (mode {image.mode}); save the images as float "
                    "arrays in an .npz"
                )
            grey, first = grey and image.mode in GREY, first or (file, image.size)
            if image.size != first[1] and not size:
                (width, height), (width_0, height_0) = image.size, first[1]
                raise RequestError(
                    f"'{first[0]}' has {width_0}x{height_0} pixels (width x height) and '{file}' has {width}x{height}; "
                    "make them alike, or set model.image to the size that all are stretched to"
                )
    width, height = (size, size) if size else first[1]
    out = np.empty((len(files), height, width) if grey else (len(files), height, width, 3), np.uint8)
    decoding = Pass(progress, "decoding the images", sum(sizes))
    for row, file, count in zip(out, files, sizes, strict=True):
        decoding.read(count)
        with _picture(Image, file) as image:
            plain = image.convert("L" if grey else "RGB")
            row[:] = plain.resize((width, height), Image.Resampling.BILINEAR) if size else plain
    return out


def _size(file: Path) -> int:
    with _reading(file):
        return file.stat().st_size


def _known(Image, file: Path):
    """An open image file, not decoded yet. Raises `RequestError` for what is none."""
    try:
        return Image.open(file)
    except Image.UnidentifiedImageError as error:
        raise RequestError(
            f"'{file}' is no image that Pillow knows; remove it from the images, or make it anew if it is one"
        ) from error


@contextmanager
def _picture(Image, file: Path):
    """An open image file; decoding it may fail as well as opening it."""
    try:
        with _reading(file), _known(Image, file) as image:
            yield image
    except Image.DecompressionBombError as error:
        raise RequestError(f"'{file}' cannot be read ({error}); make it smaller") from error


def renumber(labels: Int[np.ndarray, " n"], names: Sequence[str], wanted: Sequence[str]) -> Int[np.ndarray, " n"]:
    """Labels that number `names` as labels that number `wanted`, which holds them all."""
    return np.array([wanted.index(name) for name in names], np.int64)[labels]
