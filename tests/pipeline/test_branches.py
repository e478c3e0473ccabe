"""Programs that wait for other pipeline ranks in branches that not all take: each is seen, and told."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import P, lax

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.parallel.pipeline.executor import SHARED
from jaxdist.programs.branch_check import across_ranks

ring = [(0, 1), (1, 0)]
WRONG = {
    "psum": (lambda x: lax.psum(x, "pipeline"), r"is an all-reduce .* between devices of ranks \[0, 1\]"),
    "both": (lambda x: lax.psum(x, ("pipeline", "model")), r"is an all-reduce .* between devices of ranks \[0, 1\]"),
    "permute": (lambda x: lax.ppermute(x, "pipeline", ring), "is a collective-permute .* all devices meet there"),
    "within": (lambda x: lax.ppermute(x, "model", ring), "is a collective-permute .* all devices meet there"),
    "in a loop": (
        lambda x: lax.fori_loop(0, 3, lambda _, x: jnp.sin(lax.ppermute(x, "model", ring)), x),
        "is a collective-permute .* all devices meet there",
    ),
    "gather": (lambda x: lax.all_gather(x, "pipeline", tiled=True)[:4], r"is an all-gather .* of ranks \[0, 1\]"),
}
RIGHT = {
    "psum": lambda x: lax.psum(x, "model"),
    "several": lambda x: lax.psum(x, ("data", "model")),
    "gather": lambda x: lax.all_gather(x, "data", tiled=True)[:4],
    "scatter": lambda x: jnp.tile(lax.psum_scatter(x, "model", tiled=True), 2),
}


def compiled(moves, name=None) -> tuple[str, jax.sharding.Mesh]:
    """A program in which the ranks take a branch one by one, if it has no `name`, or else all together."""
    mesh = make_mesh(parse_mesh("2x2x2"), jax.devices())
    axes = "pipeline", "data", "model"

    def tick(x, t):
        on = t > 1 if name else lax.axis_index("pipeline") == t
        run = lambda x: lax.pcast(moves(x), tuple(set(axes) - jax.typeof(moves(x)).mat.varying), to="varying") * 2
        with jax.named_scope(name or "own"):
            return lax.cond(on, run, lambda x: x, x), None

    with jax.set_mesh(mesh):
        body = lambda x: lax.scan(tick, x, jnp.arange(4))[0]
        mapped = jax.shard_map(body, in_specs=P(axes), out_specs=P(axes))
        x = jax.device_put(jnp.arange(32.0), jax.NamedSharding(mesh, P(axes)))
        return jax.jit(mapped).lower(x).compile().as_text(), mesh


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_rule_is_told(name):
    moves, told = WRONG[name]
    found = across_ranks(*compiled(moves))
    assert len(found) == 1
    assert re.search(told, found[0]), found


@pytest.mark.parametrize("name", WRONG)
def test_it_is_legal_where_all_take_the_branch(name):
    assert across_ranks(*compiled(WRONG[name][0], SHARED)) == []


@pytest.mark.parametrize("name", RIGHT)
def test_what_stays_within_a_rank_is_legal(name):
    text, mesh = compiled(RIGHT[name])
    assert "conditional(" in text
    assert across_ranks(text, mesh) == []
