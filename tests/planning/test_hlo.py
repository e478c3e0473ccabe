"""What compiled programs run: the reader, on programs whose communication is known beforehand."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist.programs.hlo import Collective, Work, collectives
from tests.communication import reading
from tests.communication.reading import summary
from tests.planning.programs import BLOCK, CUBE, OVER_MODEL, computation, found, mesh_of, program, read

pytestmark = pytest.mark.smoke

GRIDS = {
    "2x4": {"data": 2, "model": 4},
    "4x2": {"data": 4, "model": 2},
    "2x2x2": {"replica": 2, "data": 2, "model": 2},
}


@pytest.mark.parametrize(
    ("grid", "axes"),
    [
        ("2x4", ("data",)),
        ("2x4", ("model",)),
        ("4x2", ("data",)),
        ("4x2", ("model",)),
        ("2x2x2", ("replica",)),
        ("2x2x2", ("data",)),
        ("2x2x2", ("replica", "data")),
        ("2x2x2", ("replica", "model")),
        ("2x2x2", ("replica", "data", "model")),
    ],
)
def test_each_kind_over_each_axis(grid, axes):
    mesh = mesh_of(**GRIDS[grid])
    n = math.prod(mesh.shape[axis] for axis in axes)

    def one_of_each(a):
        return (
            lax.psum(a, axes),
            lax.all_gather(a, axes, tiled=True),
            lax.psum_scatter(a, axes, tiled=True),
            lax.all_to_all(a, axes, 0, 1, tiled=True),
            lax.ppermute(a, axes, [(i, (i + 1) % n) for i in range(n)]),
        )

    ring = (n - 1) / n
    size = math.prod(BLOCK)
    sent = {(one.kind, one.axes, one.elements, one.count): one.wire for one in found(one_of_each, mesh)}
    assert sent == {
        ("all-reduce", axes, size, 1): pytest.approx(2 * ring * size),
        ("all-gather", axes, size * n, 1): pytest.approx(ring * size * n),
        ("reduce-scatter", axes, size, 1): pytest.approx(ring * size),
        ("all-to-all", axes, size, 1): pytest.approx(ring * size),
        ("collective-permute", axes, size, 1): pytest.approx(size),
    }


def test_the_order_of_the_devices_does_not_matter():
    """HLO numbers devices by their place in the mesh."""
    shuffled = [jax.devices()[i] for i in (0, 4, 2, 6, 1, 5, 3, 7)]
    ours, usual = mesh_of(shuffled, **GRIDS["2x4"]), mesh_of(**GRIDS["2x4"])
    assert found(lambda a: lax.psum(a, "data"), ours) == found(lambda a: lax.psum(a, "data"), usual)


def test_nothing_is_sent_over_axes_of_one():
    assert found(lambda a: lax.psum(a, ("pipeline", "context"))) == []
    assert [one.axes for one in found(lambda a: lax.psum(a, ("context", "model")))] == [("model",)]
    assert found(lambda a: lax.psum(a, "data"), mesh_of()) == []


def repeat(function, times):
    return lambda a: lax.scan(lambda carry, _: (function(carry), None), a, length=times)[0]


def test_trip_counts_multiply():
    def outer(a):
        inner = repeat(lambda b: jnp.sin(lax.psum(b, "model")), 3)
        return jnp.sin(lax.psum(inner(a), "data"))

    size = math.prod(BLOCK)
    places = found(repeat(outer, 5))
    assert summary(places) == {
        ("all-reduce", ("model",)): (15, 15 * size),
        ("all-reduce", ("data",)): (5, 5 * size),
    }
    assert {one.axes: one.depth for one in places} == {("model",): 2, ("data",): 1}
    assert {one.axes: one.wire_bytes for one in places} == {("model",): 15 * 4 * size, ("data",): 5 * 4 * size}


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (2, 17)])
def test_a_fori_loop(start, stop):
    loop = functools.partial(lax.fori_loop, start, stop, lambda i, a: jnp.sin(lax.psum(a, "data")))
    assert [one.count for one in found(loop)] == [stop - start]


def test_a_reduction_that_the_partitioner_makes():
    """Without shard_map, in the loop that the sum is in."""
    mesh = mesh_of(data=4)
    rows = jax.ShapeDtypeStruct((5, 8, 64), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P(None, "data")))
    total = jax.jit(lambda x: lax.scan(lambda total, row: (total + row.sum(0), None), jnp.zeros(64), x)[0])
    with jax.set_mesh(mesh):
        text = total.lower(rows).compile().as_text()
    assert collectives(text, mesh) == [Collective("all-reduce", ("data",), 4, (("f32", 64),), count=5, depth=1)]


def test_combined_all_reduces_are_summed():
    """One tuple on CPU; the sum is the same where XLA leaves them apart."""
    (elements,) = [e for _, e in summary(found(lambda a: lax.psum((a, jnp.sin(a[:1])), "data"))).values()]
    assert elements == math.prod(BLOCK) + BLOCK[1]


def test_dtypes():
    assert [one.dtypes for one in found(lambda a: lax.psum(a, "data"), dtype=jnp.int32)] == [("s32",)]


def test_bytes_of_a_mixed_tuple():
    """All-reduce sends everything twice, but for one device's share."""
    (one,) = read(f"(f32[8]{{0}}, bf16[6]{{0}}, f32[1]{{0}}) all-reduce(%p, %q, %r), {OVER_MODEL}")
    assert (one.sizes, one.dtypes, one.elements) == ((("bf16", 6), ("f32", 9)), ("bf16", "f32"), 15)
    assert (one.payload_bytes, one.wire, one.wire_bytes) == (6 * 2 + 9 * 4, 2 / 2 * 15, 2 / 2 * 48)


def test_an_array_of_one_element_is_no_scalar():
    """A number of each layer, where there is one layer, is among what a prediction counts; a loss is not."""
    (one,) = read(f"(f32[8]{{0}}, f32[1]{{0}}, f32[]) all-reduce(%p, %q, %r), {OVER_MODEL}")
    assert (one.scalars, one.array_elements, one.array_bytes) == (("f32",), 9, 36)


def test_what_cannot_be_counted_raises():
    reduce = lambda a: lax.psum(a, "model")
    with pytest.raises(ValueError, match="unknown length"):
        found(lambda a: lax.while_loop(lambda a: a.sum() < 100, reduce, a))
    assert found(lambda a: lax.while_loop(lambda a: a.sum() < 100, lambda a: a * 2, a)) == []


def test_an_all_to_all_in_a_loop_of_unknown_length_counts_in_no_total():
    """Rounds of experts are as many as their queues are long; what is around them is certain."""
    exchange = lambda a: lax.all_to_all(a, "model", 0, 0, tiled=True)
    turns = lambda a: lax.while_loop(lambda a: a.sum() < 100, exchange, a)
    certain, uncertain = found(lambda a: repeat(turns, 3)(exchange(a)))
    assert (certain.count, certain.repeated, certain.wire > 0) == (1, False, True)
    assert (uncertain.count, uncertain.repeated, uncertain.wire_bytes, uncertain.depth) == (0, True, 0, 2)
    assert uncertain.payload_bytes == certain.payload_bytes > 0


def test_a_branch_is_flagged():
    reduce = lambda a: lax.psum(a, "model")
    either = lambda a: lax.cond(a.sum() > 3, reduce, lambda a: a, a)
    (one,) = found(lambda a: repeat(either, 3)(a))
    assert (one.branch, one.count, one.depth) == (True, 3, 1)
    both = found(lambda a: lax.psum(either(a), "data"))
    assert {one.axes: one.branch for one in both} == {("model",): True, ("data",): False}


def test_the_other_tests_refuse_branches():
    """They read through `reading`, for how often a branch runs is not known."""
    text = program(
        "f32[8]{0} conditional(%p, %q, %r), true_computation=%inner, false_computation=%other",
        before=INNER + computation("other"),
    )
    assert [one.branch for one in collectives(text, CUBE)] == [True]
    with pytest.raises(AssertionError, match="branch"):
        reading.collectives(text, CUBE)


INNER = computation("inner", f"(f32[8]{{0}}, bf16[8]{{0}}) all-reduce(%p, %q), {OVER_MODEL}")


@pytest.mark.parametrize(
    ("caller", "sync"),
    [
        ("f32[8]{0} call(%p), to_apply=%inner", True),
        ("f32[8]{0} fusion(%p), kind=kCustom, calls=%inner", True),
        ('f32[8]{0} custom-call(%p), custom_call_target="x", called_computations={%other, %inner}', True),
        ("((f32[8]), f32[8]) async-start(%p), calls=%inner", False),
        ("((f32[8]), f32[8], u32[]) fusion-start(%p), kind=kCustom, calls=%inner", False),
        ('((f32[8]), f32[8]) async-start(%p), calls=%inner, backend_config={"c":{"is_sync":true}}', True),
    ],
)
def test_callees_are_followed(caller, sync):
    expected = Collective("all-reduce", ("model",), 2, (("bf16", 8), ("f32", 8)), sync=sync)
    assert read(caller, "f32[8]{0} async-done(%0), calls=%inner", before=INNER) == [expected]


def test_what_only_runs_before_is_not_called():
    """An instruction may have the name of a computation."""
    assert read("f32[8]{0} copy(%p), control-predecessors={%inner}", before=INNER) == []


def loop(times: int, body: str = "inner", condition: str = "empty") -> str:
    known = f'backend_config={{"known_trip_count":{{"n":"{times}"}},"dynamic_variables":[]}}'
    return f"f32[8]{{0}} while(%p), condition=%{condition}, body=%{body}, {known}"


def test_a_peeled_loop():
    """XLA:GPU runs the last pass of a loop after it: the same work in two places."""
    before = f"{INNER}\n{computation('outer', loop(3), loop(5))}"
    counts = [
        (one.count, one.depth)
        for one in read(loop(7, "outer"), loop(2), "f32[8] call(), to_apply=%inner", before=before)
    ]
    assert counts == [(21, 2), (35, 2), (2, 1), (1, 0)]


def test_a_condition_runs_once_more_than_its_loop():
    assert [one.count for one in read(loop(6, "empty", "inner"), before=INNER)] == [7]


START, DONE = f"f32[8]{{0}} all-reduce-start(%p), {OVER_MODEL}", "f32[8]{0} all-reduce-done(%0)"
PIECES = "\n".join(
    [
        INNER,
        computation("plain", "f32[8] add(%a, %b)", "f32[] reduce(%0, %z), to_apply=%add"),
        computation("product", "f32[8] dot(%a, %b)", "f32[8] add(%0, %b)"),
        computation("nested", "f32[8] fusion(%a), kind=kLoop, calls=%plain", "f32[8] fusion(%a), calls=%product"),
        computation("layer", "f32[8] fusion(), calls=%product", "f32[8] copy(%0)", "f32[8] fusion(), calls=%plain"),
        computation("less", "f32[8] fusion(), calls=%plain"),
        computation("twice", loop(2, "layer"), "f32[8] fusion(), calls=%plain"),
        computation("unknown", "pred[] compare(%x, %y), direction=NE"),
    ]
)


@pytest.mark.parametrize(
    ("between", "work"),
    [
        ([], (0, 0)),
        (["f32[8] get-tuple-element(%x), index=0", "f32[8] copy(%1)", "f32[8] bitcast(%2)"], (0, 0)),
        (["f32[8] fusion(%x), kind=kLoop, calls=%plain"], (0, 1)),
        (["f32[8] fusion(%x), kind=kOutput, calls=%product"], (1, 0)),
        (["f32[8] fusion(%x), kind=kLoop, calls=%nested"], (1, 0)),
        (["f32[8] fusion(), calls=%product", "f32[8] fusion(), calls=%plain", "f32[8] dot(%x, %y)"], (2, 1)),
        (['f32[8] fusion(%x), calls=%plain, backend_config={"kind":"__triton_gemm"}'], (1, 0)),
        (['f32[8] fusion(%x), calls=%plain, backend_config={"kind":"__triton_nested_gemm_fusion"}'], (1, 0)),
        (['f32[8] fusion(%x), calls=%plain, backend_config={"kind":"__triton"}'], (0, 1)),
        (['f32[8] custom-call(%x), custom_call_target="__cublas$gemm"'], (1, 0)),
        (['(f32[8], s8[1]) custom-call(%x), custom_call_target="__cublas$lt$matmul$f8"'], (1, 0)),
        (['f32[8] custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward"'], (1, 0)),
        (['f32[8] custom-call(%x), custom_call_target="__triton_gemm"'], (1, 0)),
        (['f32[8] custom-call(%x), custom_call_target="__cub$DeviceRadixSort"'], (0, 1)),
        (["f32[8] convolution(%x, %y), window={size=3}"], (1, 0)),
        (["f32[8] fusion(%x), kind=kCustom, calls=%inner"], (0, 0)),
        ([loop(5, "layer")], (5, 5)),
        ([loop(3, "twice")], (6, 9)),
        ([loop(0, "layer")], (0, 0)),
        (["f32[8] while(%p), condition=%unknown, body=%layer"], (1, 1)),
        (["f32[8] call(%x), to_apply=%layer"], (1, 1)),
        (["f32[8] conditional(%x, %y), branch_computations={%layer, %less}"], (0, 1)),
        (["((f32[8]), f32[8]) fusion-start(%x), calls=%product", "f32[8] fusion-done(%1)"], (1, 0)),
        (["((f32[8]), f32[8]) async-start(%x), calls=%layer", "f32[8] async-done(%1), calls=%layer"], (1, 1)),
        (
            [f"f32[8]{{0}} all-reduce-start(%y), {OVER_MODEL}", "f32[8] dot(%x, %y)", "f32[8] all-reduce-done(%1)"],
            (1, 0),
        ),
    ],
)
def test_compute_between_start_and_done(between, work):
    """And nothing of what stands before or after."""
    dot = "f32[8] dot(%x, %y)"
    one = read(START, *between, DONE, dot, before=PIECES)[0]
    assert (one.sync, one.overlapped) == (False, Work(*work))


def test_an_update_between_start_and_done():
    one = "((f32[8]), f32[8])"
    lines = [f"{one} async-start(%p), calls=%inner", "f32[8] dot(%x, %y)", f"{one} async-update(%0), calls=%inner"]
    done = ["f32[8] dot(%x, %y)", "f32[8] async-done(%2), calls=%inner", "f32[8] dot(%x, %y)"]
    assert [one.overlapped for one in read(*lines, *done, before=INNER)] == [Work(2, 0)]


def test_synchronous_collectives_of_a_gpu():
    """A pair that XLA marks, or, since jaxlib 0.12, an operation of its own."""
    known = 'backend_config={"collective_backend_config":{"is_sync":true,"is_pipelined":false}}'
    pair = read(f"{START}, {known}", "f32[8] dot(%x, %y)", DONE)
    alone = read(f"f32[8]{{0}} all-reduce(%p), {OVER_MODEL}, {known}")
    assert pair == alone == [Collective("all-reduce", ("model",), 2, (("f32", 8),), sync=True)]


def test_where_overlap_cannot_be_told_raises():
    with pytest.raises(ValueError, match="not waited for"):
        read(START, "f32[8] all-reduce-done(%other)")
    with pytest.raises(ValueError, match="not scheduled"):
        collectives(program(START, DONE, header="num_partitions=8"), CUBE)
