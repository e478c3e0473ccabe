"""Images that cannot be used: each mistake is named with its place, its values and a remedy."""

import sys

import numpy as np
import pytest

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.images import open_images
from tests.data.files import save_pictures

U8 = np.random.default_rng(0).integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
L = np.arange(40) % 4
HOLE = U8.astype(np.float32)
HOLE[17, 2, 3, 1] = np.nan
HUGE = U8.astype(np.float64)
HUGE[3] = 1e39


def told(config: dict, **asked) -> str:
    with pytest.raises(RequestError) as raised:
        open_images(DataConfig(**config), **asked)
    return str(raised.value)


def arrays(**changes):
    return {"images": U8, "labels": L, **changes}


BAD_ARRAYS = [
    # arrays, what else is asked for, and what the sentence has to say
    (arrays(images=U8.astype(np.int64)), {}, ["images of", "are int64", "uint8 or as a float"]),
    (arrays(images=U8 > 9), {}, ["are bool"]),
    (arrays(images=U8[0, 0]), {}, ["have 2 dims (5 x 3)", "[n, H, W, C]", "5 images and 40 labels"]),
    (arrays(images=U8[..., None]), {}, ["have 5 dims (40 x 6 x 5 x 3 x 1)"]),
    (arrays(images=U8[0, 0, 0, 0]), {}, ["have 0 dims"]),
    (arrays(images=U8[:0], labels=L[:0]), {}, ["has no images (its array is 0 x 6 x 5 x 3)"]),
    (arrays(images=U8[:, :0]), {}, ["has no images (its array is 40 x 0 x 5 x 3)"]),
    (arrays(images=np.resize(U8, (40, 3, 8, 8))), {}, ["40 x 3 x 8 x 8", "channels first", "transpose(0, 2, 3, 1)"]),
    (arrays(images=HOLE), {}, ["image 17 of", "not finite", "repair it"]),
    (arrays(images=HUGE), {}, ["image 3 of", "not finite in float32"]),
    (arrays(images=U8 * 0 + 7), {}, ["the same single colour"]),
    (arrays(labels=L[:39]), {}, ["has 40 images and 39 labels", "a label for each"]),
    (arrays(labels=L.astype(float)), {}, ["labels of", "are float64", "whole numbers"]),
    (arrays(labels=L[:, None]), {}, ["labels of", "2 dims (40, 1)", "they need 1"]),
    (arrays(labels=np.eye(4)[L]), {}, ["are float64", "2 dims (40, 4)"]),
    (arrays(labels=L - 1), {}, ["label -1 of image 0", "out of range for 4 classes", "from 0 to 3"]),
    (arrays(labels=L + 1), {}, ["label 4 of image 3", "without gaps, or set model.classes"]),
    (arrays(labels=L), {"classes": 3}, ["label 3 of image 3", "out of range for 3 classes"]),
    (arrays(labels=L * 0), {}, ["has 1 class; give images of at least 2"]),
    (arrays(labels=L * 0 + 5), {}, ["has 1 class"]),
    (arrays(labels=L * 0), {"classes": 4}, ["to train on", "are of 1 of the 4 classes"]),
    (arrays(), {"size": 32}, ["are 6x5, and model.image is 32", "resize the arrays"]),
    (arrays(label=L), {}, ["has 'label'; did you mean 'labels'?"]),
    (arrays(zzz=L), {}, ["has 'zzz'; valid names are images, labels"]),
    ({"images": U8}, {}, ["lacks labels", "labels [n]"]),
    (arrays(validation_images=U8), {}, ["lacks validation_labels"]),
    (
        arrays(validation_images=U8[..., :1], validation_labels=L),
        {},
        ["are 6x5x3 of uint8", "those of the held-out part of", "are 6x5x1 of uint8"],
    ),
    (arrays(validation_images=U8 / 255, validation_labels=L), {}, ["6x5x3 of uint8", "6x5x3 of float64"]),
    (
        arrays(validation_images=U8, validation_labels=L + 1),
        {},
        ["label 4 of the held-out", "out of range for the 4 classes"],
    ),
    (arrays(validation_images=U8, validation_labels=L - 3), {}, ["label -3 of the held-out part of", "use 0 to 3"]),
    (
        arrays(validation_images=U8, validation_labels=L[1:]),
        {},
        ["the held-out part of", "has 40 images and 39 labels"],
    ),
    (arrays(validation_images=HOLE, validation_labels=L), {}, ["6x5x3 of uint8", "6x5x3 of float32"]),
]


@pytest.mark.parametrize(("arrays", "asked", "sentences"), BAD_ARRAYS, ids=[" ".join(c[2])[:50] for c in BAD_ARRAYS])
@pytest.mark.parametrize("form", ["npz", "npy"])
def test_arrays(tmp_path, form, arrays, asked, sentences):
    path = tmp_path / ("data.npz" if form == "npz" else "data")
    if form == "npz":
        np.savez(path, **arrays)
    else:
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / name, array)
    text = told({"path": path}, **asked)
    for sentence in [*sentences, str(path)]:
        assert sentence in text


def test_too_few_to_hold_any_out(tmp_path):
    np.savez(tmp_path / "a.npz", images=U8[:8], labels=L[:8])
    text = told({"path": tmp_path / "a.npz", "validation_fraction": 0.01})
    assert "no image of the 8 of" in text
    assert "data.validation_fraction 0.01; raise it" in text


BAD_FILES = [
    # files (None: a folder), the knobs, and what the sentence has to say
    ({}, {"path": "a"}, ["a' does not exist", "give an .npz with images and labels, a folder"]),
    ({}, {"path": "a", "validation_path": "b"}, ["a' does not exist", "b' does not exist"]),
    ({}, {"validation_path": "b"}, ["data.path is not set", "part of the digits"]),
    ({}, {"path": "a", "tokenizer": "t.json"}, ["data.tokenizer is", "images need none"]),
    ({"a.txt": b"x"}, {"path": "a.txt"}, ["is not image data", ".npz"]),
    ({"a.npz": b""}, {"path": "a.npz"}, ["a.npz' cannot be read (", "create it again"]),
    ({"a.npz": b"PK\x03\x04 broken"}, {"path": "a.npz"}, ["a.npz' cannot be read ("]),
    ({"d/images.npy": b"no", "d/labels.npy": b"no"}, {"path": "d"}, ["d' cannot be read ("]),
    ({"d/labels.npy": b"no"}, {"path": "d"}, ["lacks images"]),
    ({"d": None}, {"path": "d"}, ["d' is empty"]),
    (
        {"d/a.png": b"", "d/b/1.png": b""},
        {"path": "d"},
        ["a.png' is not a folder, but each class needs a folder", "remove it"],
    ),
    (
        {"d/a.png": b""},
        {"path": "d"},
        ["a.png' is not a folder, but each class needs a folder", "a sub-folder of images for each"],
    ),
    ({"d/a/1.png": 0, "d/b": None}, {"path": "d"}, ["b' has no images", "or remove it"]),
    ({"d/a/1.png": 0, "d/b/c/1.png": 0}, {"path": "d"}, ["c' is a folder inside that of a class"]),
    ({"d/a/1.png": 0, "d/a/2.png": 1}, {"path": "d"}, ["has 1 class"]),
    ({"d/a/1.png": 0, "d/b/2.png": b"words"}, {"path": "d"}, ["2.png' is not an image that Pillow knows; remove it"]),
    ({"d/a/1.png": 0, "d/b/Thumbs.db": b"words"}, {"path": "d"}, ["Thumbs.db' is not an image", "remove it"]),
    ({"d/a/1.png": 0, "d/b/2.png": 9}, {"path": "d"}, ["1.png' has 5x6 pixels", "2.png' has 4x7", "set model.image"]),
    ({"d/a/1.png": 0, "d/b/2.png": -16}, {"path": "d"}, ["2.png' has more than 8 bits", "mode I;16"]),
    (
        {"d/train/a/1.png": 0, "d/train/b/1.png": 1, "d/val/c/1.png": 2},
        {"path": "d"},
        ["val' has a class 'c' that", "train' lacks"],
    ),
    ({"d/train/a/1.png": 0, "d/val": None, "d/validation": None}, {"path": "d"}, ["holds 'train' and 'val' and"]),
    ({"d/train/a/1.png": 0, "d/test": None}, {"path": "d"}, ["holds 'train' and 'test'", "data.validation_path"]),
    (
        {"d/train/a/1.png": 0, "d/train/b/1.png": 1, "d/val/a/1.png": 2},
        {"path": "d", "validation_path": "d/val"},
        ["d' has a held-out part of its own", "leave out one"],
    ),
    ({"d/a/1.png": 0, "d/b/1.png": 1}, {"path": "d", "validation_path": "d"}, ["are the same"]),
]


@pytest.mark.parametrize(("files", "knobs", "sentences"), BAD_FILES, ids=[" ".join(c[2])[:50] for c in BAD_FILES])
def test_files(tmp_path, files, knobs, sentences):
    for name, content in files.items():
        path = tmp_path / name
        (path if content is None else path.parent).mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            other = {9: U8[0, :, :, 0].repeat(2)[:28].reshape(7, 4), -16: U8[0, ..., 0].astype(np.uint16)}
            save_pictures(tmp_path, {name: other.get(content, U8[content])})
    text = told({name: tmp_path / value for name, value in knobs.items()})
    for sentence in sentences:
        assert sentence in text


def test_a_picture_that_is_cut_short(tmp_path):
    save_pictures(tmp_path, {"a/1.png": np.resize(U8, (40, 40, 3)), "b/1.png": np.resize(U8[1:], (40, 40, 3))})
    whole = (tmp_path / "b" / "1.png").read_bytes()
    (tmp_path / "b" / "1.png").write_bytes(whole[: len(whole) // 2])
    assert "1.png' cannot be read (" in told({"path": tmp_path})


def test_arrays_beside_class_folders(tmp_path):
    save_pictures(tmp_path / "d", {"a/1.png": U8[0], "b/1.png": U8[1]})
    np.savez(tmp_path / "a.npz", images=U8[:2], labels=L[:2])
    text = told({"path": tmp_path / "d", "validation_path": tmp_path / "a.npz"})
    assert "names its classes; give two of one kind" in text
    assert "has 2 classes, and model.classes is 3" in told({"path": tmp_path / "d"}, classes=3)


def test_a_file_with_one_nameless_array(tmp_path):
    np.save(tmp_path / "a.npy", U8)
    (tmp_path / "a.npy").rename(tmp_path / "a.npz")
    assert "one array without a name; save it with numpy.savez" in told({"path": tmp_path / "a.npz"})


def test_python_objects_are_not_loaded(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.array([print, 1], object), labels=L[:2])
    assert "Object arrays cannot be loaded" in told({"path": tmp_path / "a.npz"})


@pytest.mark.parametrize(("module", "name"), [("sklearn.datasets", "scikit-learn"), ("PIL", "Pillow")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, module, name):
    save_pictures(tmp_path, {"a/1.png": U8[0], "b/1.png": U8[1]})
    monkeypatch.setitem(sys.modules, module, None)
    text = told({} if name == "scikit-learn" else {"path": tmp_path})
    assert name in text
    assert "install 'jaxdist[lab]'" in text
