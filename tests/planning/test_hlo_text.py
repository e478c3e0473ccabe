"""The forms in which jaxlib 0.10 to 0.12 write a compiled program, one by one; unknown ones raise."""

import pytest

from jaxdist.programs.hlo import Collective, Work, collectives
from tests.planning.programs import CUBE, OVER_MODEL, computation, looped, mesh_of, program, read

pytestmark = pytest.mark.smoke


def reduced_over(groups: str) -> list[tuple[str, ...]]:
    return [
        one.axes for one in read(f"f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add")
    ]


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


def test_all_replicas_of_one_partition_are_not_all_devices():
    with pytest.raises(ValueError, match="replicas"):
        read("f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add")


@pytest.mark.parametrize(
    ("instruction", "sizes"),
    [
        ("f32[8]{0} all-reduce-start(%p)", {"f32": 8}),
        ("(f32[8]{0}, f32[3]{0}) all-reduce-start(%p, %q)", {"f32": 11}),
        ("((f32[8]{0}), f32[8]{0}) all-reduce-start(%p)", {"f32": 8}),
        ("((s32[]), s32[]) all-reduce-start(%p)", {"s32": 1}),
        ("((f32[8]{0}, f32[3]{0}), (f32[8]{0}, f32[3]{0})) all-reduce-start(%p, %q)", {"f32": 11}),
        ("(f32[4,2]{1,0}, f32[8,2]{1,0}) all-gather-start(%p)", {"f32": 16}),
        ("((f32[4]{0}, f32[1]{0}), (f32[8]{0}, f32[2]{0})) all-gather-start(%p, %q)", {"f32": 10}),
        ("((f32[4]{0}, s8[1]{0}), (f32[8]{0}, s8[2]{0}), u32[]) all-gather-start(%p, %q)", {"f32": 8, "s8": 2}),
        ("((f32[8]{0}), f32[4]{0}) reduce-scatter-start(%p)", {"f32": 8}),
        ("((f32[8]{0}, bf16[6]{0}), (f32[4]{0}, bf16[3]{0})) reduce-scatter-start(%p, %q)", {"bf16": 6, "f32": 8}),
        ("((f32[8]{0}), f32[8]{0}) all-to-all-start(%p)", {"f32": 8}),
        ("(f32[8]{0}, /*index=1*/f32[3]{0:T(8)S(1)}) all-reduce(f32[8]{0:T(8)} %p, /*index=1*/%q)", {"f32": 11}),
        ("f32[4]{0} reduce-scatter(%p)", {"f32": 8}),
        ("f32[8]{0} all-gather(%p)", {"f32": 8}),
        ("(f32[4]{0}, f32[4]{0}) all-to-all(%p, %q)", {"f32": 8}),
    ],
)
def test_each_form_counts_once(instruction, sizes):
    """As jaxlib 0.10 and 0.12 print them for GPU and CPU, alone and combined."""
    opcode = instruction.split("(%")[0].split("(f32[8]{0:T")[0].split()[-1]
    kind, asynchronous = opcode.removesuffix("-start"), opcode.endswith("-start")
    done = [f"f32[8]{{0}} {kind}-done(%0)"] if asynchronous else []
    scalars = tuple(dtype for dtype in sizes if f"{dtype}[]" in instruction)
    expected = Collective(kind, ("model",), 2, tuple(sorted(sizes.items())), scalars, sync=not asynchronous)
    assert read(f"{instruction}, {OVER_MODEL}", *done) == [expected]


def test_an_asynchronous_permute():
    start = "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,2},{4,6}}"
    expected = Collective("collective-permute", ("data",), 2, (("f32", 8),), sync=False)
    assert read(start, "f32[8]{0} collective-permute-done(%0)") == [expected]


@pytest.mark.parametrize(
    "instruction",
    [
        "(f32[8]{0}, f32[8]{0}) all-reduce-start(%p)",
        "f32[8]{0} all-gather-start(%p)",
        "(f32[8]{0}, f32[8]{0}) all-reduce(%p)",
        "f32[8]{0} all-reduce(%p, %q)",
        "f32[<=8]{0} all-reduce(%p)",
        "token[] all-reduce(%p)",
        "s4[8]{0} all-reduce(%p)",
        "f4e2m1fn[8]{0} all-reduce(%p)",
        "new[8]{0} all-reduce(%p)",
    ],
)
def test_other_forms_raise(instruction):
    with pytest.raises(ValueError):
        read(f"{instruction}, {OVER_MODEL}", "f32[8]{0} x-done(%0)")


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("pred", 1), ("s8", 1), ("f8e4m3fn", 1), ("bf16", 2), ("f16", 2), ("u32", 4), ("f32", 4), ("f64", 8), ("c64", 8)],
)
def test_bytes_of_each_dtype(dtype, size):
    (one,) = read(f"{dtype}[3,5]{{1,0}} all-reduce(%p), {OVER_MODEL}")
    assert (one.dtypes, one.elements, one.payload_bytes) == ((dtype,), 15, 15 * size)


def test_the_length_of_a_loop_that_xla_does_not_tell():
    bound, less = "s32[] constant(6)", "pred[] fusion(%i, %0), kind=kLoop, calls=%less"
    assert [one.count for one in collectives(looped(bound, less), CUBE)] == [6]
    assert [one.count for one in collectives(looped(bound, "pred[] compare(%i, %0), direction=LT"), CUBE)] == [6]
    down = "pred[] compare(%i, %0), direction=GT"
    for unclear in [
        (less,),
        (bound, down),
        (bound, bound, less),
        (bound, less, "pred[] and(%1, %x)"),
        ("f32[] constant(6.5)", less),
    ]:
        with pytest.raises(ValueError, match="unknown length"):
            collectives(looped(*unclear), CUBE)


@pytest.mark.parametrize(
    "operation",
    ["collective-broadcast", "ragged-all-to-all", "send", "recv", "send-start", "all-shuffle", "collective-new-start"],
)
def test_another_kind_of_communication_raises(operation):
    with pytest.raises(ValueError, match=operation.removesuffix("-start")):
        read(f"f32[8]{{0}} {operation}(%p), {OVER_MODEL}")


def test_what_cannot_be_read_raises():
    with pytest.raises(ValueError, match="cannot be read"):
        read("f32[8] all-reduce %p")
    with pytest.raises(ValueError, match="no ENTRY"):
        collectives("HloModule m, num_partitions=8", CUBE)
    with pytest.raises(ValueError, match="%main'] ENTRY"):
        collectives(program(before="ENTRY " + computation("other")), CUBE)


def test_a_program_for_other_devices_raises():
    with pytest.raises(ValueError, match=r"for 8 devices, the mesh has 4"):
        collectives(program(), mesh_of(data=4))
    with pytest.raises(ValueError, match=r"for 1 device, the mesh has 8"):
        collectives(program("f32[] parameter(0), metadata={num_partitions=8}", header="is_scheduled=true"), CUBE)
    with pytest.raises(ValueError, match="replicas"):
        collectives(program(header="replica_count=8, num_partitions=8"), CUBE)


H100 = {
    "0.10": (
        "f32[41761]{0} all-reduce-start(%p), channel_id=1, replica_groups=mesh['axis_0'=1,'axis_1'=4,'axis_2'=2], "
        "device_ids=([2,4]T(1,0)) {'axis_2'}, use_global_device_ids=true, to_apply=%region_67.114.clone, "
        'metadata={op_name="jit(train)/while/body/(jvp()/shard_map/reduce:jvp())" stack_frame_id=38}, '
        'backend_config={"operation_queue_id":"0","collective_backend_config":{"is_sync":false,"backend":"DEFAULT"}}'
    ),
    "0.12": (
        "((f32[41761]{0}), f32[41761]{0}) all-reduce-start(%p), channel_id=18, "
        "replica_groups=mesh['pipeline'=1,'replica'=2,'data'=2,'expert'=1,'context'=1,'model'=2] {'replica'}, "
        "use_global_device_ids=true, to_apply=%region_47.67.clone, output_to_operand_aliasing={{1}: (0, {})}, "
        'frontend_attributes={is_spmd_generated="true"}, metadata={op_name="jit(train)/reduce_sum"}, '
        'backend_config={"collective_backend_config":{"is_sync":false,"is_spmd_generated":false}}'
    ),
}


@pytest.mark.parametrize("version", H100)
def test_as_compiled_for_an_h100(version):
    """A gradient over `replica`, and one fusion beside it."""
    fusion = "f32[3]{0} fusion(), kind=kLoop, calls=%fused"
    before = computation("fused", "f32[3]{0} broadcast(%x), dimensions={}")
    done = 'f32[41761]{0} all-reduce-done(%0), backend_config={"collective_backend_config":{"is_sync":false}}'
    expected = Collective("all-reduce", ("replica",), 2, (("f32", 41761),), sync=False, overlapped=Work(0, 1))
    assert read(H100[version], fusion, done, before=before) == [expected]
