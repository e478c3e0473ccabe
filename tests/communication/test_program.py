"""The reader of compiled programs, on programs whose communication is known beforehand."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxdist.mesh import AXES, make_mesh
from tests.communication.program import Collective, collectives, summary

pytestmark = pytest.mark.smoke

GRIDS = {
    "2x4": {"data": 2, "model": 4},
    "4x2": {"data": 4, "model": 2},
    "2x2x2": {"replica": 2, "data": 2, "model": 2},
}


def mesh_of(devices=None, **sizes: int) -> jax.sharding.Mesh:
    shape = dict.fromkeys(AXES, 1) | sizes
    return make_mesh(shape, (devices or jax.devices())[: math.prod(shape.values())])


CUBE = mesh_of(**GRIDS["2x2x2"])
BLOCK = (8, 16)
"""What each device holds of the array that `found` gives to its function."""


def found(function, mesh=CUBE, dtype=jnp.float32) -> list[Collective]:
    """The collectives of `function`, which every device runs on its own block."""
    spec = jax.P(AXES)
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    array = jax.ShapeDtypeStruct((mesh.size * BLOCK[0], BLOCK[1]), dtype, sharding=jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        return collectives(mapped.lower(array).compile().as_text(), mesh)


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
    assert summary(found(repeat(outer, 5))) == {
        ("all-reduce", ("model",)): (15, 15 * size),
        ("all-reduce", ("data",)): (5, 5 * size),
    }


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
    assert collectives(text, mesh) == [Collective("all-reduce", ("data",), 4, 64, ("f32",), count=5)]


def test_combined_all_reduces_are_summed():
    """One tuple on CPU; the sum is the same where XLA leaves them apart."""
    (elements,) = [e for _, e in summary(found(lambda a: lax.psum((a, jnp.sin(a[:1])), "data"))).values()]
    assert elements == math.prod(BLOCK) + BLOCK[1]


def test_dtypes():
    assert [one.dtypes for one in found(lambda a: lax.psum(a, "data"), dtype=jnp.int32)] == [("s32",)]


def test_what_cannot_be_counted_raises():
    reduce = lambda a: lax.psum(a, "model")
    with pytest.raises(ValueError, match="branch"):
        found(lambda a: lax.cond(a.sum() > 3, reduce, lambda a: a, a))
    with pytest.raises(ValueError, match="unknown length"):
        found(lambda a: lax.while_loop(lambda a: a.sum() < 100, reduce, a))
    assert found(lambda a: lax.while_loop(lambda a: a.sum() < 100, lambda a: a * 2, a)) == []


def program(*instructions: str, before: str = "") -> str:
    lines = "\n".join(f"  %{i} = {instruction}" for i, instruction in enumerate(instructions))
    return f"HloModule m, num_partitions=8\n\n{before}\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n"


def reduced_over(groups: str) -> list[tuple[str, ...]]:
    text = program(f"f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add")
    return [one.axes for one in collectives(text, CUBE)]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{}", "replica data model"),
        ("{{0,1,2,3,4,5,6,7}}", "replica data model"),
        ("{{0,4},{1,5},{2,6},{3,7}}", "replica"),
        ("{{0,1},{4,5},{2,3},{6,7}}", "model"),
        ("{{0,5,1,4},{2,3,6,7}}", "replica model"),
        ("[4,2]<=[8]", "model"),
        ("[4,2]<=[2,4]T(1,0)", "replica"),
        ("[4,2]<=[2,2,2]T(0,2,1)", "data"),
        ("[2,4]<=[4,2]T(1,0)", "replica data"),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", "replica"),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", "data model"),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1','axis_0'}", "replica data model"),
        ("mesh['pipeline'=1,'replica'=2,'data'=2,'model'=2] {'replica','data'}", "replica data"),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", "data"),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", "model"),
        ("mesh['a'=2,'b'=2,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", "replica"),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,1,3,4,6,5,7) {'a'}", "replica"),
        ("mesh['a'=4,'b'=2], device_ids=(0,2,1,3,4,6,5,7) {'b'}", "data"),
        ("mesh['a'=8] {'a':(1)2}", "replica"),
        ("mesh['a'=8] {'a':(2)2}", "data"),
        ("mesh['a'=8] {'a':(2)4}", "data model"),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", "replica model"),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", "replica model"),
        ("mesh[a=2,b=4] {b:(1)2}", "data"),
    ],
)
def test_each_notation_of_groups(groups, axes):
    assert reduced_over(groups) == [tuple(axes.split())]


@pytest.mark.parametrize("groups", ["{{0},{1},{2},{3},{4},{5},{6},{7}}", "[8,1]<=[8]", "mesh['a'=8] {}"])
def test_groups_of_one_device_are_left_out(groups):
    assert reduced_over(groups) == []


@pytest.mark.parametrize(
    "groups",
    [
        "all",
        "[4,2]",
        "[4,2]<=[8]S(0)",
        "[4,2]<=[4]",
        "mesh['a'=8]",
        "mesh['a'=8] {'b'}",
        "mesh['a'=8], ids=(0) {'a'}",
        "{{0,1},{2,3}}",
        "{{0,3},{1,2},{4,7},{5,6}}",
        "{{0,1},{2,4},{3,5},{6,7}}",
        "{{0,1,2},{3,4,5,6,7}}",
    ],
)
def test_other_groups_raise(groups):
    with pytest.raises(ValueError):
        reduced_over(groups)


GPU = "channel_id=1, replica_groups=[4,2]<=[8]"


@pytest.mark.parametrize(
    ("instruction", "elements"),
    [
        ("f32[8]{0} all-reduce-start(%p)", 8),
        ("(f32[8]{0}, f32[3]{0}) all-reduce-start(%p, %q)", 11),
        ("((f32[8]{0}), f32[8]{0}) all-reduce-start(%p)", 8),
        ("((f32[8]{0}, f32[3]{0}), (f32[8]{0}, f32[3]{0})) all-reduce-start(%p, %q)", 11),
        ("(f32[4,2]{1,0}, f32[8,2]{1,0}) all-gather-start(%p)", 16),
        ("((f32[4]{0}, f32[1]{0}), (f32[8]{0}, f32[2]{0})) all-gather-start(%p, %q)", 10),
        ("((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%p)", 8),
        ("((f32[8]{0}), f32[8]{0}) all-to-all-start(%p)", 8),
        ("(f32[8]{0}, /*index=1*/f32[3]{0:T(8)S(1)}) all-reduce(%p, %q)", 11),
    ],
)
def test_asynchronous_collectives_count_once(instruction, elements):
    """As jaxlib 0.10 and 0.12 print them for GPU."""
    kind = instruction.split("(%")[0].split()[-1].removesuffix("-start")
    text = program(f"{instruction}, {GPU}, to_apply=%add", f"f32[8]{{0}} {kind}-done(%0)")
    assert collectives(text, CUBE) == [Collective(kind, ("model",), 2, elements, ("f32",))]


def test_an_asynchronous_permute():
    text = program(
        "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,2},{4,6}}"
    )
    assert collectives(text, CUBE) == [Collective("collective-permute", ("data",), 2, 8, ("f32",))]


INNER = f"""%inner (p: f32[8]) -> f32[8] {{
  ROOT %all = (f32[8]{{0}}, bf16[8]{{0}}) all-reduce(%p, %q), {GPU}, to_apply=%add
}}"""


@pytest.mark.parametrize(
    "caller",
    [
        "f32[8]{0} call(%p), to_apply=%inner",
        "f32[8]{0} fusion(%p), kind=kCustom, calls=%inner",
        "((f32[8]), f32[8]) async-start(%p), calls=%inner",
        'f32[8]{0} custom-call(%p), custom_call_target="x", called_computations={%other, %inner}',
    ],
)
def test_callees_are_followed(caller):
    text = program(caller, "f32[8]{0} async-done(%0), calls=%inner", before=INNER)
    assert collectives(text, CUBE) == [Collective("all-reduce", ("model",), 2, 16, ("bf16", "f32"))]


def looped(*condition: str) -> str:
    lines = "\n".join(f"  %c{i} = {line}" for i, line in enumerate(condition))
    less = "%less (i: s32[]) -> pred[] {\n  ROOT %lt = pred[] compare(%i, %n), direction=LT\n}"
    before = f"{INNER}\n\n{less}\n\n%until (i: s32[]) -> pred[] {{\n{lines}\n}}"
    return program("f32[8]{0} while(%p), condition=%until, body=%inner", before=before)


def test_a_loop_without_a_known_trip_count():
    bound, less = "s32[] constant(6)", "pred[] fusion(%i, %c0), kind=kLoop, calls=%less"
    assert [one.count for one in collectives(looped(bound, less), CUBE)] == [6]
    assert [one.count for one in collectives(looped(bound, "pred[] compare(%i, %c0), direction=LT"), CUBE)] == [6]
    down = "pred[] compare(%i, %c0), direction=GT"
    for unclear in [
        (less,),
        (bound, down),
        (bound, bound, less),
        (bound, less, "pred[] and(%c1, %x)"),
        ("f32[] constant(6.5)", less),
    ]:
        with pytest.raises(ValueError, match="unknown length"):
            collectives(looped(*unclear), CUBE)


def test_a_condition_runs_once_more_than_its_loop():
    known = 'backend_config={"known_trip_count":{"n":"6"},"dynamic_variables":[]}'
    text = program(f"f32[8]{{0}} while(%p), condition=%inner, body=%empty, {known}", before=INNER)
    assert [one.count for one in collectives(text, CUBE)] == [7]


def test_another_kind_of_communication_raises():
    with pytest.raises(ValueError, match="collective-broadcast"):
        collectives(program(f"f32[8]{{0}} collective-broadcast(%p), {GPU}"), CUBE)


def test_what_cannot_be_read_raises():
    with pytest.raises(ValueError, match="cannot be read"):
        collectives(program("f32[8] all-reduce %p"), CUBE)
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("HloModule m, num_partitions=8", CUBE)


def test_a_program_for_another_mesh_raises():
    with pytest.raises(ValueError, match=r"for 8 device\(s\), the mesh has 4"):
        collectives(program(), mesh_of(data=4))
