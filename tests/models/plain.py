"""Plain readings of papers: what the models' own tests compare with."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.models import Model
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.step import Step

VOCAB, ROWS, SEQUENCE = 80, 3, 24


def summed_loss(logits, labels):
    """Cross-entropy in nats, summed over the labels that are not -1."""
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.sum(jnp.where(labels >= 0, nll, 0))


def frequencies(theta: float, size: int) -> tuple[float, ...]:
    """The angles by which one position turns the pairs of a head (Su et al. 2021, section 3.2.2)."""
    return tuple(theta ** (-2 * i / size) for i in range(size // 2))


def layers(params, count: int):
    return [jax.tree.map(lambda a, i=i: a[i], params["blocks"]) for i in range(count)]


def assert_same(layout, model: Model, reference, noise: float) -> None:
    """Loss, gradient and logits of `model` are those of `reference(params, tokens) -> logits`.

    `noise` is added to the initial parameters, so that none is 0 or 1.
    """
    params = jax.jit(model.init)(jax.random.key(1))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda a: a + np.float32(noise) * rng.normal(size=a.shape).astype(a.dtype), params)
    tokens, labels = rng.integers(0, VOCAB, (ROWS, SEQUENCE)), rng.integers(-1, VOCAB, (ROWS, SEQUENCE))
    batch = {"tokens": jnp.asarray(tokens)[None], "labels": jnp.asarray(labels)[None]}
    forward = DecoderForward(model, layout)
    step = Step(forward, optimizer=None)

    def ours(params):
        return step.evaluate(params, {}, batch)[0], forward.logits(params, batch["tokens"][0])

    def plain(params):
        logits = reference(params, tokens)
        return summed_loss(logits, labels), logits

    (wanted, wanted_logits), wanted_gradient = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    (loss, logits), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    np.testing.assert_allclose(logits, wanted_logits, atol=1e-4)
    for (path, a), b in zip(jax.tree.leaves_with_path(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * float(jnp.abs(b).max()), err_msg=jax.tree_util.keystr(path))
