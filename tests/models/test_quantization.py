"""Quantized forms: what they stand for against plain references, how far off they are, and who holds what of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import ModelConfig
from jaxdist.models.quantization import FORMS, NF4
from jaxdist.sharding import named
from tests.parity import cases

NORMAL = np.random.default_rng(0).normal(0, 0.02, (3, 256, 5)).astype(np.float32)
"""Blocks lie along the middle dim."""


def decoded(form: str, w: np.ndarray, dim: int = 1) -> np.ndarray:
    return FORMS[form].decode(np, FORMS[form].encode(np, w, dim), dim)


def blocks(w: np.ndarray) -> np.ndarray:
    """[rows, 64]: of NORMAL's form, one block a row"""
    return np.moveaxis(w, 1, 2).reshape(-1, 64)


def test_int8_rounds_to_127_steps_of_the_largest_of_a_block():
    found = blocks(decoded("int8", NORMAL))
    for block, got in zip(blocks(NORMAL), found, strict=True):
        step = np.abs(block).max() / 127
        np.testing.assert_allclose(got, np.round(block / step) * step, rtol=1e-6, atol=1e-9)


def test_nf4_takes_the_nearest_of_16_numbers_times_a_scale_that_is_rounded_itself():
    found = np.moveaxis(decoded("nf4", NORMAL), 1, 2).reshape(-1, 4, 64)
    for row, got in zip(np.moveaxis(NORMAL, 1, 2).reshape(-1, 4, 64), found, strict=True):
        largest = np.abs(row).max(1)
        for block, peak, numbers in zip(row, largest, got, strict=True):
            scale = np.round(255 * peak / largest.max()) * largest.max() / 255
            places = np.abs(block[:, None] / scale - np.array(NF4)).argmin(1)
            np.testing.assert_allclose(numbers, np.array(NF4)[places] * scale, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(("form", "least", "most"), [("int8", 0.003, 0.008), ("nf4", 0.08, 0.1)])
def test_normal_numbers_are_off_by_so_much(form, least, most):
    error = np.linalg.norm(decoded(form, NORMAL) - NORMAL) / np.linalg.norm(NORMAL)
    assert least < error < most


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_zeros_and_single_large_numbers(form):
    w = np.zeros((1, 128, 2), np.float32)
    w[0, 5, 0] = -3.0
    found = decoded(form, w)
    np.testing.assert_allclose(found, w, rtol=1e-6)
    assert not np.any(decoded(form, np.zeros_like(w)))


@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_numbers_too_small_for_an_inverse(form):
    w = np.full((1, 128, 2), 1e-40, np.float32)
    w[0, 64:] = 0.5
    with np.errstate(over="raise", divide="raise", invalid="raise"):
        found = decoded(form, w)
    assert np.all(np.isfinite(found))
    assert np.all(np.abs(found[0, :64]) < 1e-2)
    np.testing.assert_allclose(found[0, 64:], 0.5, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_numpy_and_jax_make_the_same_bits_along_any_dim(form, dim):
    w = np.moveaxis(NORMAL, 1, dim)
    with_jax = jax.jit(lambda w: FORMS[form].encode(jnp, w, dim))(w)
    jax.tree.map(np.testing.assert_array_equal, FORMS[form].encode(np, w, dim), with_jax)
    np.testing.assert_array_equal(decoded(form, w, dim), np.moveaxis(decoded(form, NORMAL), 1, dim))


@pytest.mark.parametrize(("form", "bits"), [("int8", 8 + 32 / 64), ("nf4", 4 + 8 / 64 + 32 / 256)])
def test_bits_of_a_number(form, bits):
    arrays = FORMS[form].encode(np, NORMAL, 1)
    assert 8 * sum(a.nbytes for a in arrays.values()) / NORMAL.size == bits


@pytest.mark.parametrize("model", [cases.MODEL, cases.LLAMA], ids=lambda model: model.family)
@pytest.mark.parametrize("form", FORMS)
def test_matrices_of_layers_are_held_in_the_form_and_others_in_bfloat16(model: ModelConfig, form):
    held = models.build(model.model_copy(update={"lora_rank": 2, "lora_base": form}))
    plain = models.build(model)
    of_matrices = {name for name, a in named(plain.abstract).items() if name.startswith("blocks") and a.ndim > 2}
    of_matrices -= {name for name in of_matrices if name.endswith("bias")}
    names = FORMS[form].encode(np, np.zeros((1, 64, 1), np.float32), 1)
    arrays = named(held.abstract)
    assert {name for name in arrays if arrays[name].dtype != jnp.bfloat16 and ".lora." not in name} == {
        f"{matrix}.{name}" for matrix in of_matrices for name in names
    }
