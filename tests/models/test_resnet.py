"""Image classifiers: published sizes, a block by hand, and the statistics of BatchNorm."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxdist.models.resnet import CNN, Basic, ConvNorm, ResNet
from tests.tiers import thinned


@cache
def make(model, *arguments, **knobs):
    """Without computing anything. It is not changed by those who share it."""
    return nnx.eval_shape(lambda: model(*arguments, rngs=nnx.Rngs(0), **knobs))


def images(*shape):
    return jax.random.normal(jax.random.key(7), shape)


@pytest.mark.parametrize(("depth", "published"), [(18, 11_689_512), (50, 25_557_032)])
def test_parameters_are_as_many_as_published(depth, published):
    params = nnx.state(make(ResNet, depth, 1000, 3), nnx.Param)
    assert sum(a.size for a in jax.tree.leaves(params)) == published


def test_a_depth_that_is_not_there():
    with pytest.raises(ValueError, match="no ResNet of depth 34 here; use 18 or 50"):
        ResNet(34, 10, 3, nnx.Rngs(0))


@pytest.mark.parametrize(
    ("size", "shape", "inside"),
    [
        (224, (224, 224, 3), [56, 28, 14, 7]),
        (64, (64, 80, 3), [16, 8, 4, 2]),
        (63, (63, 63, 3), [63, 32, 16, 8]),
        (8, (8, 8, 1), [8, 4, 2, 1]),
    ],
)
def test_stem_and_stages(size, shape, inside):
    """Table 1 of the paper for 224; stages of half the resolution after a stem that keeps it for small images."""
    # The sizes of the one whose parameters are counted above, which is made once.
    depth, classes, width = (50, 1000, 64) if size == 224 else (18, 10, 4)
    knobs = {} if size == 224 else dict(width=width, size=size)
    module = make(ResNet, depth, classes, shape[-1], **knobs)
    graph, state = nnx.split(module)
    seen = []

    def run(state, x):
        module = nnx.merge(graph, state)
        logits = module(x)
        x = module.stem(x)
        x = nnx.max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))) if module.large else x
        for block in module.blocks:
            x = block(x)
            seen.append(x.shape)
        return logits

    assert jax.eval_shape(run, state, jax.ShapeDtypeStruct((2, *shape), jnp.float32)).shape == (2, classes)
    assert [s[1] for s in dict.fromkeys(seen)] == inside
    expansion = 1 if depth == 18 else 4
    assert [s[-1] for s in dict.fromkeys(seen)] == [width * expansion * 2**stage for stage in range(4)]


def test_a_bottleneck_has_its_stride_in_the_3x3():
    first = make(ResNet, 50, 1000, 3).blocks[3]  # of the second stage
    assert [(layer.conv.kernel_size, layer.conv.strides) for layer in first.branch] == [
        ((1, 1), (1, 1)),
        ((3, 3), (2, 2)),
        ((1, 1), (1, 1)),
    ]
    assert (first.shortcut.conv.kernel_size, first.shortcut.conv.strides) == ((1, 1), (2, 2))


@pytest.mark.parametrize("shape", thinned([((9, 13, 2),), ((8, 8, 1),), ((1, 1, 1),)], 3))
def test_cnn_takes_images_of_any_size(shape):
    graph, params, rest = nnx.split(CNN(10, shape[-1], nnx.Rngs(0), width=4), nnx.Param, ...)
    logits, _ = call(graph, params, rest, images(3, *shape), True)
    assert logits.shape == (3, 10)
    assert np.isfinite(logits).all()


def convolve(x, kernel, stride, padding):
    """[B, H, W, I] by [s, s, I, O]: the definition, a position at a time."""
    x = np.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0)))
    size = kernel.shape[0]
    height, width = ((n - size) // stride + 1 for n in x.shape[1:3])
    out = np.zeros((len(x), height, width, kernel.shape[-1]))
    for i in range(height):
        for j in range(width):
            window = x[:, i * stride : i * stride + size, j * stride : j * stride + size]
            out[:, i, j] = np.einsum("bhwi,hwio->bo", window, kernel)
    return out


def conv_norm(layer, x, stride, padding):
    """In eval mode."""
    mean, var, scale, bias = (np.asarray(v[...], np.float64) for v in _norm(layer))
    x = convolve(x, np.asarray(layer.conv.kernel[...], np.float64), stride, padding)
    return (x - mean) / np.sqrt(var + 1e-5) * scale + bias


def _norm(layer):
    return layer.norm.mean, layer.norm.var, layer.norm.scale, layer.norm.bias


@pytest.mark.parametrize(("inputs", "stride"), [(3, 2), (4, 2), (4, 1)])
def test_a_basic_block_by_hand(inputs, stride):
    block = Basic(inputs, 4, stride, nnx.Rngs(1))
    rng = np.random.default_rng(0)
    for layer in [*block.branch, *([block.shortcut] if block.shortcut else [])]:
        for variable in _norm(layer):
            variable[...] = jnp.asarray(rng.uniform(0.5, 1.5, 4), jnp.float32)
    block.eval()
    assert (block.shortcut is None) == (inputs == 4 and stride == 1)
    x = rng.normal(size=(2, 7, 6, inputs))
    y = conv_norm(block.branch[1], np.maximum(conv_norm(block.branch[0], x, stride, 1), 0), 1, 1)
    wanted = np.maximum(y + (conv_norm(block.shortcut, x, stride, 0) if block.shortcut else x), 0)
    np.testing.assert_allclose(block(jnp.asarray(x, jnp.float32)), wanted, atol=2e-5)


@pytest.fixture(scope="module")
def resnet():
    """Graph, parameters and the rest of a narrow ResNet-18."""
    return nnx.split(ResNet(18, 10, 1, nnx.Rngs(0), width=2, size=8), nnx.Param, ...)


@partial(jax.jit, static_argnums=(0, 4))
def call(graph, params, rest, x, train):
    """Logits and the rest afterwards."""
    module = nnx.merge(graph, params, rest, copy=True)
    module.train() if train else module.eval()
    return module(x), nnx.state(module, nnx.Not(nnx.Param))


@pytest.mark.slow
def test_every_residual_branch_starts_at_zero(resnet):
    """Each block without a projection is then the identity, in both modes (its input is not negative)."""
    module = nnx.merge(*resnet, copy=True)
    x = jax.nn.relu(images(2, 4, 4, 2))
    assert module.blocks[0].shortcut is None
    assert np.array_equal(module.blocks[0](x), x)
    scales = [[layer.norm.scale[...].mean().item() for layer in block.branch] for block in module.blocks]
    assert scales == [[1, 0]] * 8


def test_initial_weights_are_he_normal_by_fan_out():
    kernel = ConvNorm(64, 128, 3, nnx.Rngs(0)).conv.kernel[...]
    assert kernel.shape == (3, 3, 64, 128)
    assert float(kernel.std()) == pytest.approx(np.sqrt(2 / (9 * 128)), rel=0.01)


def test_statistics_change_in_train_mode_by_a_tenth():
    module = CNN(10, 1, nnx.Rngs(0), width=4)
    x = images(16, 8, 8, 1)
    inside = module.layers[0].conv(x)
    module(x)
    norm = module.layers[0].norm
    np.testing.assert_allclose(norm.mean[...], 0.1 * np.mean(inside, (0, 1, 2)), atol=1e-6)
    np.testing.assert_allclose(norm.var[...], 0.9 + 0.1 * np.var(inside, (0, 1, 2)), rtol=1e-5)


@pytest.mark.slow
def test_a_resnet_inside_jit_with_its_state_passed_through(resnet):
    graph, params, rest = resnet
    x = images(4, 8, 8, 1)
    logits, same = call(graph, params, rest, x, False)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (rest, same)), strict=True))
    alone, _ = call(graph, params, rest, x[:1], False)
    np.testing.assert_allclose(logits[:1], alone, atol=1e-6)  # in eval mode a row knows nothing of the others
    seen, changed = call(graph, params, rest, x, True)
    assert not np.allclose(seen, logits, atol=1e-3)
    assert jax.tree.structure(changed) == jax.tree.structure(rest)
    assert all(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (rest, changed)), strict=True))


def test_dropout_drops_in_train_mode_only():
    module = CNN(10, 1, nnx.Rngs(0), width=4, dropout=0.5)
    x = images(2, 8, 8, 1)
    assert not np.array_equal(module(x), module(x))
    module.eval()
    assert np.array_equal(module(x), module(x))
    assert not jax.tree.leaves(nnx.state(make(CNN, 10, 1), nnx.RngState))


@pytest.mark.slow
def test_gradients_inside_jit_with_the_state_passed_through():
    """A second step goes on with the statistics and the random numbers of the first, as a plain module does."""
    start = lambda: CNN(10, 1, nnx.Rngs(0), width=4, dropout=0.5)
    graph, params, rest = nnx.split(start(), nnx.Param, ...)

    @jax.jit
    def step(params, rest, x):
        def loss(params):
            module = nnx.merge(graph, params, rest, copy=True)
            logits = module(x)
            return jnp.mean(logits**2), (logits, nnx.state(module, nnx.Not(nnx.Param)))

        (_, seen), gradient = jax.value_and_grad(loss, has_aux=True)(params)
        return *seen, gradient

    module, x = start(), images(4, 8, 8, 1)
    for _ in range(2):
        logits, rest, gradient = step(params, rest, x)
        np.testing.assert_allclose(logits, module(x), atol=1e-5)
    after = nnx.filter_state(rest, nnx.BatchStat), nnx.state(module, nnx.BatchStat)
    for a, b in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(params)
