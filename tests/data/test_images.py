"""Images from each kind of source, and the batches made of them: the same on any mesh."""

import os

import jax
import numpy as np
import pytest

from jaxdist.config import DataConfig, DataLost
from jaxdist.data.batches import BatchLayout
from jaxdist.data.images import Part, open_images
from jaxdist.data.images.batches import Augment, abstract_image_batch, image_batch
from jaxdist.data.order import global_rows, held_out_rows
from jaxdist.data.tokens import IGNORED
from tests.data.files import save_pictures
from tests.data.test_batches import on

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (60, 6, 5, 3), dtype=np.uint8)
LABELS = np.arange(60) % 4
MESHES = ["1x1x1", "4x1x1", "data=2,replica=2"]


def open_(size=0, classes=0, **knobs):
    return open_images(DataConfig(**knobs), size, classes)


def save(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.fixture
def numbered() -> Part:
    """24 images of one pixel that is the number of its row."""
    pixels = np.arange(24, dtype=np.float32).reshape(-1, 1, 1, 1)
    unit = np.ones(1, np.float32)
    return Part(pixels, np.arange(24), np.arange(24, dtype=np.int32) % 5, 0 * unit, unit)


# ---- sources


def test_digits_without_a_path():
    images = open_()
    assert images.classes == tuple("0123456789")
    assert images.train.rows + images.validation.rows == 1797
    assert images.train.shape == (8, 8, 1)
    assert images.train.labels.dtype == images.validation.labels.dtype == np.int32
    assert images.validation.labels.tolist().count(3) == 15
    assert images.source == "scikit-learn's digits, 1702 images of 8x8x1 and 95 held out, 10 classes"
    assert (float(images.mean[0]), float(images.std[0])) == pytest.approx((4.885245, 6.019257))  # of 0 to 16
    assert sorted(images.validation.index.tolist())[:5] == [10, 21, 48, 68, 83], "other rows are held out than were"


def test_the_training_part_is_normalised_and_the_other_alike(tmp_path):
    pixels = PIXELS.copy()
    pixels[..., 2] = 7  # a channel that says nothing
    images = open_(path=save(tmp_path / "a.npz", images=pixels, labels=LABELS), validation_fraction=0.3)
    rows = images.train.index
    np.testing.assert_allclose(images.mean, pixels[rows].reshape(-1, 3).mean(0), rtol=1e-6)
    np.testing.assert_allclose(images.std, [*pixels[rows].reshape(-1, 3).std(0)[:2], 1], rtol=1e-6)
    seen = images.train.read(np.arange(images.train.rows))
    assert seen.dtype == np.float32
    np.testing.assert_allclose(seen.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(seen.std((0, 1, 2)), [1, 1, 0], atol=1e-5)
    held_out = images.validation.read(np.array([1, 0]))
    np.testing.assert_allclose(held_out * images.std + images.mean, pixels[images.validation.index[[1, 0]]], atol=1e-3)
    assert np.array_equal(images.validation.labels, LABELS[images.validation.index])


def test_each_row_is_in_one_part_and_its_number_alone_says_in_which(tmp_path):
    few, more = (
        open_(path=save(tmp_path / "a.npz", images=np.resize(PIXELS, (n, 6, 5, 3)), labels=np.resize(LABELS, n)))
        for n in (300, 4000)
    )
    for images, n in ((few, 300), (more, 4000)):
        assert np.array_equal(np.sort([*images.train.index, *images.validation.index]), np.arange(n))
    assert np.array_equal(few.validation.index, more.validation.index[more.validation.index < 300])
    assert abs(more.validation.rows - 200) < 4 * np.sqrt(200)


@pytest.mark.parametrize("dtype", ["u1", "<f2", ">f4", "<f8"])
def test_an_npz_and_npy_files_hold_the_same_and_the_latter_are_mapped(tmp_path, dtype):
    arrays = dict(images=PIXELS[..., 0].astype(dtype), labels=LABELS)
    for name, array in arrays.items():
        np.save(tmp_path / name, array)
    mapped, loaded = open_(path=tmp_path), open_(path=save(tmp_path / "a.npz", **arrays))
    assert isinstance(mapped.train.images, np.memmap)
    assert mapped.train.shape == (6, 5, 1)
    assert mapped.fingerprint == loaded.fingerprint
    rows = np.arange(mapped.train.rows)
    assert np.array_equal(mapped.train.read(rows), loaded.train.read(rows))
    assert mapped.train.read(rows).dtype == np.float32


def test_a_held_out_part_of_its_own_or_from_its_own_path(tmp_path):
    a, b = (dict(images=PIXELS[rows], labels=LABELS[rows]) for rows in (slice(40), slice(40, 60)))
    both = save(tmp_path / "both.npz", **a, validation_images=b["images"], validation_labels=b["labels"])
    one = open_(path=both)
    two = open_(path=save(tmp_path / "a.npz", **a), validation_path=save(tmp_path / "b.npz", **b))
    for images in (one, two):
        assert (images.train.rows, images.validation.rows) == (40, 20)
        assert np.array_equal(images.validation.labels, LABELS[40:])
        np.testing.assert_allclose(images.mean, PIXELS[:40].reshape(-1, 3).mean(0), rtol=1e-6)
    assert one.fingerprint == two.fingerprint


def test_class_folders(tmp_path):
    grey = PIXELS[..., 0]
    save_pictures(tmp_path, {f"{name}/{i}.png": grey[n] for n, (name, i) in enumerate(["b2", "b1", "a9", "c1", "c0"])})
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "a" / ".hidden").touch()
    images = open_(path=tmp_path, validation_fraction=0.3)
    assert images.classes == ("a", "b", "c")
    order = [2, 1, 0, 4, 3]
    assert images.train.shape == (6, 5, 1)
    assert np.array_equal(images.train.images[..., 0], grey[order])
    assert np.array_equal(np.array([0, 1, 1, 2, 2])[images.train.index], images.train.labels)


@pytest.mark.parametrize("name", ["validation", "val"])
def test_class_folders_in_two_parts_of_any_kind_of_file(tmp_path, name):
    """A grey picture among coloured ones is read as RGB; the classes of the held-out part go by their names."""
    save_pictures(tmp_path / "train", {"a/1.png": PIXELS[0], "b/1.bmp": PIXELS[1, ..., 0], "c/1.png": PIXELS[2]})
    save_pictures(tmp_path / name, {"c/9.png": PIXELS[3], "b/8.tiff": PIXELS[4]})
    images = open_(path=tmp_path)
    assert images.train.labels.tolist() == [0, 1, 2]
    assert images.validation.labels.tolist() == [1, 2]
    assert np.array_equal(images.train.images[1], np.repeat(PIXELS[1, ..., :1], 3, -1))
    assert np.array_equal(images.validation.images, PIXELS[[4, 3]])
    apart = open_(path=tmp_path / "train", validation_path=tmp_path / name)
    assert apart.fingerprint == images.fingerprint


def test_class_folders_stretched_to_a_size(tmp_path):
    flat = lambda height, width, value: np.full((height, width, 3), value, np.uint8)
    save_pictures(tmp_path / "train", {"a/1.png": flat(9, 4, 10), "b/1.png": flat(3, 5, 20)})
    save_pictures(tmp_path / "val", {"b/1.png": flat(8, 8, 30)})
    images = open_(path=tmp_path, size=6)
    assert images.train.shape == images.validation.shape == (6, 6, 3)
    assert [int(a.max()) for a in (*images.train.images, *images.validation.images)] == [10, 20, 30]
    assert float(images.mean[0]) == 15
    assert float(images.std[0]) == 5


def test_the_fingerprint_changes_with_content_and_split(tmp_path):
    def fingerprint(pixels=PIXELS, labels=LABELS, **knobs):
        return open_(path=save(tmp_path / "a.npz", images=pixels, labels=labels), **knobs).fingerprint

    other_pixels, other_labels = PIXELS.copy(), LABELS.copy()
    other_pixels[59, 5, 4, 2] ^= 1
    other_labels[59] = 0
    found = {
        fingerprint(),
        fingerprint(other_pixels),
        fingerprint(labels=other_labels),
        fingerprint(validation_fraction=0.2),
        fingerprint(PIXELS.reshape(60, 5, 6, 3)),
        fingerprint(classes=5),
    }
    assert len(found) == 6
    assert fingerprint() in found


def test_many_chunks_are_read_like_one(tmp_path, monkeypatch):
    path = save(tmp_path / "a.npz", images=PIXELS.astype(np.float32), labels=LABELS)
    whole = open_(path=path)
    monkeypatch.setattr("jaxdist.data.images.CHUNK", 7 * PIXELS[0].nbytes * 4)
    parts = open_(path=path)
    assert parts.fingerprint == whole.fingerprint
    np.testing.assert_allclose(parts.mean, whole.mean, rtol=1e-7)
    np.testing.assert_allclose(parts.std, whole.std, rtol=1e-7)


# ---- augmentation


def test_a_crop_and_a_mirror_image_by_hand():
    """Each result is the window that `choices` tells of the padded image, and the choices are pinned."""
    images = RNG.normal(size=(40, 6, 5, 2)).astype(np.float32)
    rows = np.arange(100, 140)
    for fill, mode in (("zero", "constant"), ("reflect", "reflect")):
        augment = Augment(3, pad=2, fill=fill)
        out = augment(images, rows, 7)
        for i, (y, x, mirrored) in enumerate(zip(*augment.choices(rows, 7), strict=True)):
            padded = np.pad(images[i], ((2, 2), (2, 2), (0, 0)), mode)
            wanted = padded[y : y + 6, x : x + 5]
            assert np.array_equal(out[i], wanted[:, ::-1] if mirrored else wanted)
    down, right, mirrored = Augment(0).choices(np.arange(6), 0)
    assert down.tolist() == [2, 3, 6, 2, 8, 3]
    assert right.tolist() == [5, 4, 6, 8, 1, 7]
    assert mirrored.tolist() == [0, 1, 0, 1, 1, 0]


def test_choices_are_even_and_independent():
    rows = np.arange(40_000)
    down, right, mirrored = Augment(1, pad=2).choices(rows, 5)
    table = np.zeros((5, 5, 2))
    np.add.at(table, (down, right, mirrored.astype(int)), 1)
    chi_squared = ((table - 800) ** 2 / 800).sum()
    assert chi_squared < 49 + 5 * np.sqrt(2 * 49)
    for other in (Augment(2, pad=2).choices(rows, 5), Augment(1, pad=2).choices(rows, 6)):
        assert abs(np.corrcoef(down, other[0])[0, 1]) < 0.02
        assert abs(np.corrcoef(mirrored, other[2])[0, 1]) < 0.02


def test_a_row_is_augmented_by_its_number_whatever_comes_with_it():
    images = RNG.normal(size=(40, 6, 6, 1)).astype(np.float32)
    augment, rows = Augment(0), np.arange(40)
    some = RNG.permutation(40)[:7]
    assert np.array_equal(augment(images, rows, 3)[some], augment(images[some], rows[some], 3))
    assert not np.array_equal(augment(images, rows, 3), augment(images, rows, 4))
    assert np.array_equal(Augment(0, pad=0, flip=False)(images, rows, 3), images)


# ---- batches


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("augment", [None, Augment(5, pad=1)], ids=["plain", "augmented"])
def test_batches_are_the_same_on_every_mesh(tmp_path, mesh, accumulation, augment):
    part = open_(path=save(tmp_path / "a.npz", images=PIXELS, labels=LABELS)).train
    rows = global_rows(0, 3, 8, part.rows)
    rows[6] = -1
    batch = image_batch(part, rows, BatchLayout(accumulation, *on(mesh)), augment, 3)
    assert {name: array.dtype for name, array in batch.items()} == dict(images="float32", labels="int32", rows="int32")
    wanted = part.read(np.maximum(rows, 0))
    wanted = augment(wanted, np.maximum(rows, 0), 3) if augment else wanted
    wanted[6] = 0
    assert np.array_equal(np.asarray(batch["images"]).reshape(8, 6, 5, 3), wanted)
    assert np.array_equal(np.asarray(batch["labels"]).ravel(), np.where(rows < 0, IGNORED, part.labels[rows]))
    assert np.array_equal(batch["rows"], np.arange(8).reshape(accumulation, -1))


def test_batches_lie_where_the_layout_says_and_as_was_told(numbered):
    mesh, layout = on("data=4,replica=2")
    batch = image_batch(numbered, np.arange(16), BatchLayout(2, mesh, layout))
    for name, abstract in abstract_image_batch(16, (1, 1, 1), BatchLayout(2, mesh, layout)).items():
        array = batch[name]
        assert (array.shape, array.dtype, array.sharding) == (abstract.shape, abstract.dtype, abstract.sharding)
        assert array.sharding.spec == layout.spec((None, "batch", None, None, None)[: array.ndim]), name
        assert {shard.data.shape for shard in array.addressable_shards} == {(2, 1, 1, 1, 1)[: array.ndim]}


@pytest.mark.parametrize(("mesh", "ranks"), [("1x1x1", 1), ("4x1x1", 4), ("data=2,replica=2", 4), ("2x2x1", 2)])
def test_a_sample_reaches_one_data_rank_once_an_epoch(numbered, mesh, ranks, monkeypatch):
    """And no row is read twice, whoever holds it. The next epoch has all of them in another order."""
    read, counted = Part.read, []
    monkeypatch.setattr(Part, "read", lambda self, rows: counted.extend(rows.tolist()) or read(self, rows))
    orders = []
    for epoch in range(2):
        reached, order = [], []
        for step in range(3 * epoch, 3 * epoch + 3):
            batch = image_batch(numbered, global_rows(7, step, 8, 24), BatchLayout(2, *on(mesh)))
            places = {
                (sample, shard.index[1].start or 0)  # the copies along `model` lie at the same place of the batch
                for shard in batch["images"].addressable_shards
                for sample in np.asarray(shard.data).ravel().astype(int).tolist()
            }
            assert len(places) == 8
            reached += places
            order += np.asarray(batch["images"]).ravel().astype(int).tolist()
        assert sorted(sample for sample, _ in reached) == list(range(24))
        assert len({rank for _, rank in reached}) == ranks
        orders.append(order)
    assert sum(a == b for a, b in zip(*orders, strict=True)) < 6
    assert sorted(counted) == sorted(2 * list(range(24)))


@pytest.mark.parametrize("batch", [4, 12, 24, 20])
def test_validation_covers_each_row_once_and_fills_up_with_nothing(numbered, batch):
    batch_layout = BatchLayout(1, *on("4x1x1"))
    numbers = held_out_rows(numbered.rows, batch, 0)
    batches = [jax.tree.map(np.asarray, image_batch(numbered, rows, batch_layout)) for rows in numbers]
    assert all(b["images"].shape == (1, batch, 1, 1, 1) for b in batches)
    pixels = np.concatenate([b["images"].ravel() for b in batches])
    labels = np.concatenate([b["labels"].ravel() for b in batches])
    assert np.array_equal(pixels[:24], np.arange(24))
    assert np.array_equal(labels[:24], np.arange(24) % 5)
    assert (labels[24:] == IGNORED).all()
    assert not pixels[24:].any()
    assert len(labels) - 24 < batch
    assert len(list(held_out_rows(numbered.rows, batch, 1))) == 1


def test_a_file_of_images_that_is_cut_while_it_is_read_is_a_sentence(tmp_path):
    """It is mapped: to read on would be SIGBUS."""
    np.save(tmp_path / "images.npy", RNG.integers(0, 256, (4000, 8, 8), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(4000) % 10)
    images = open_images(DataConfig(path=tmp_path), classes=10)
    images.train.read(np.array([0]))
    os.truncate(tmp_path / "images.npy", 1000)
    message = r"images.npy' was truncated while it was read: it has 1000 bytes and had 256128"
    with pytest.raises(DataLost, match=message):
        images.train.read(np.array([3000]))
