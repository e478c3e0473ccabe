"""What follows a loop of collectives waits for its end on CPUs, and nothing else of it changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P, lax

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.parallel import region
from jaxdist.programs.hlo_text import operands, parse
from tests.parity import loop_order

ALL = ("data", "model")


def the_sum_needs_the_loop(text: str) -> bool:
    """Whether the only all-reduce of the entry needs the result of a loop in which devices communicate."""
    program = parse(text)
    sent = loop_order.finder(program)
    known = {one.name: one for one in program.computations[program.entry]}
    (waiting,) = ([one.name] for one in known.values() if one.opcode == "all-reduce")
    needed = []
    while waiting:
        needed.append(known[waiting.pop()])
        waiting += [name for name in operands(needed[-1]) if name in known]
    return any(one.opcode == "while" and sent(one) for one in needed)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("further", [True, False])
def test_arrays_wait_for_the_loop_of_another_and_stay_what_they_are(waits, further):
    """One that does not vary over `model` waits for one that does, beside it or `further`; an index waits too."""
    mesh = make_mesh(parse_mesh("2x2x1"), jax.devices()[:4])

    def run(turns, index, x):
        # The turns are not known, and so XLA does not write them out.
        turn = lambda at: (at[0] + 1, region.vary(lax.psum(at[1], ALL), ALL))
        _, looped = lax.while_loop(lambda at: at[0] < turns, turn, (jnp.zeros((), jnp.int32), region.vary(x, ALL)))
        arrays = (x, index) if further else (x, index, looped)
        if waits:
            waiting = region.together(arrays, looped if further else ())
            assert [region.varying(a) for a in waiting] == [region.varying(a) for a in arrays]
            x, index, *_ = waiting
        total = lax.psum(region.vary(x[index], ("model",)), ALL)
        return total, looped

    with jax.set_mesh(mesh):
        arguments = jnp.asarray(3, jnp.int32), jnp.asarray(1, jnp.int32), jax.device_put(jnp.arange(4.0), P("data"))
        specs = dict(in_specs=(P(), P(), P("data")), out_specs=(P(), P(ALL)))
        compiled = jax.jit(jax.shard_map(run, **specs)).lower(*arguments).compile()
        total, looped = compiled(*arguments)
    assert the_sum_needs_the_loop(compiled.as_text()) == waits
    assert float(total) == 2 * (1 + 3)
    np.testing.assert_array_equal(looped, np.tile([4 * 4 * 4.0, 4 * 4 * 8], 4))


def test_indices_alone_wait_for_nothing():
    index = jnp.asarray(1)
    assert region.together((index, index)) == (index, index)
    assert region.after(index) is index
