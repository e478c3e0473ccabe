"""What is read off a compiled program of its kernels: programs made by hand, and the real ones for absent H100s."""

import math

import pytest

from jaxdist.explain import explain
from jaxdist.models.loss import CHUNK_ROWS
from jaxdist.programs import target
from jaxdist.programs.kernels import Kernels, held, kernels
from jaxdist.request import load
from tests.planning.programs import computation, program

FLASH = 'bf16[4]{0} custom-call(%0), custom_call_target="__cudnn$fmhaSoftmax'


def read(*instructions: str, before: str = "") -> Kernels:
    return kernels(program("f32[64,8]{1,0} parameter(0)", *instructions, before=before))


def fused(*instructions: str) -> dict[str, str]:
    """A fusion of these, `%p0` given the array that `read` begins with, and what to write before it."""
    body = "\n".join(f"  {instruction}" for instruction in ("%p0 = f32[64,8]{1,0} parameter(0)", *instructions))
    return dict(before=f"%inside (p: f32[8]) -> f32[8] {{\n{body}\n}}")


def fusion(made: str) -> str:
    return f"{made} fusion(%0), kind=kLoop, calls=%inside"


def looped(*instructions: str) -> str:
    """Seven turns of these in five turns of another loop."""
    inner = computation("inner", "f32[64,8]{1,0} parameter(0)", *instructions)
    loop = 'f32[64,8]{1,0} while(%0), condition=%until, body=%inner, backend_config={"known_trip_count":{"n":"7"}}'
    outer = computation("outer", "f32[64,8]{1,0} parameter(0)", loop)
    return "\n\n".join([computation("until", "pred[] constant(true)"), inner, outer])


LOOP = 'f32[64,8]{1,0} while(%0), condition=%until, body=%outer, backend_config={"known_trip_count":{"n":"5"}}'


def test_what_stands_in_loops_counts_as_often_as_they_turn():
    found = read(LOOP, f'{FLASH}"', before=looped(f'{FLASH}Backward"', "f32[8,8]{1,0} dot(%0, %0), lhs_contracting"))
    assert (found.flash_forward, found.flash_backward) == (1, 35)
    assert found.products == {"f32": 35}
    # As further rounds of experts, which mostly are none.
    unknown = read(LOOP.partition(", backend")[0], before=looped("f32[8,8]{1,0} dot(%0, %0), lhs_contracting"))
    assert unknown.products == {}


def test_products_by_the_dtypes_of_their_operands():
    inside = fused(
        "%half = bf16[64,8]{1,0} convert(%p0)",
        "%wide = f32[64,8]{1,0} convert(%half)",
        "%one = f32[8,8]{1,0} dot(%half, %half), lhs_contracting_dims={0}",
        "%two = f32[8,8]{1,0} dot(%half, %wide), lhs_contracting_dims={0}",
        "ROOT %sum = f32[8,8]{1,0} add(%one, %two)",
    )
    library = '(f32[8,8]{1,0}, s8[64]{0}) custom-call(%0, %0), custom_call_target="__cublas$gemm"'
    assert read(fusion("f32[8,8]{1,0}"), library, **inside).products == {"bf16": 1, "bf16 x f32": 1, "f32": 1}


def test_bytes_are_those_of_operands_and_results():
    found = read("f32[64,8]{1,0} negate(%0)", "(f32[64,8]{1,0}) tuple(%1)", "f32[512]{0} bitcast(%1)")
    assert found.bytes == 2 * 64 * 8 * 4
    assert (found.copied, found.stacked) == (0, 0)
    assert (found.largest, found.largest_bytes) == ("f32[64,8]", 2048)


def test_bytes_of_what_starts_and_of_pieces_outside_fusions():
    """The type of a start has its operands and its results."""
    gathered = "(f32[64,8]{1,0}, f32[512,8]{1,0}) all-gather-start(%0), replica_groups={{0,1,2,3,4,5,6,7}}"
    assert read(gathered, "f32[512,8]{1,0} all-gather-done(%1)").bytes == (64 + 512) * 8 * 4
    cut = "f32[2,8]{1,0} slice(%0), slice={[0:2], [0:8]}"
    assert read(cut, "f32[64,8]{1,0} dynamic-update-slice(%0, %1, %0, %0)").bytes == 2 * (2 * 2 * 8 * 4)


def test_of_a_stack_that_is_cut_or_written_into_only_the_piece_counts():
    cut = fused("%zero = s32[] constant(0)", "ROOT %c = f32[1,8]{1,0} dynamic-slice(%p0, %zero, %zero)")
    found = read(fusion("f32[1,8]{1,0}"), **cut)
    assert (found.bytes, found.stacked, found.copied) == (64, 64, 0)
    put = fused(
        "%zero = s32[] constant(0)",
        "%one = f32[] constant(1)",
        "%piece = f32[2,8]{1,0} broadcast(%one), dimensions={}",
        "%same = f32[2,8]{1,0} copy(%piece)",
        "%d = f32[64,8]{1,0} dynamic-update-slice(%p0, %same, %zero, %zero)",
        "ROOT %b = f32[512]{0} bitcast(%d)",
    )
    found = read(fusion("f32[512]{0}"), **put)
    assert found.bytes == 2 * 8 * 4
    assert found.copied == 0


def test_of_what_is_scattered_into_or_gathered_from_only_the_pieces_count():
    """Also where a gather stands behind a conversion, as that of a token's row of the table."""
    put = fused(
        "%one = f32[] constant(1)",
        "%at = s32[2,1]{1,0} constant({{1},{5}})",
        "%piece = f32[2,8]{1,0} broadcast(%one), dimensions={}",
        "ROOT %s = f32[64,8]{1,0} scatter(%p0, %at, %piece), index_vector_dim=1",
    )
    assert read(fusion("f32[64,8]{1,0}"), **put).bytes == 2 * 8 * 4
    taken = fused(
        "%at = s32[2,1]{1,0} constant({{1},{5}})",
        "%half = bf16[64,8]{1,0} convert(%p0)",
        "ROOT %g = bf16[2,8]{1,0} gather(%half, %at), slice_sizes={1,8}",
    )
    assert read(fusion("bf16[2,8]{1,0}"), **taken).bytes == 2 * 8 * (4 + 2)
    narrowed = fused("ROOT %half = bf16[64,8]{1,0} convert(%p0)")
    assert read(fusion("bf16[64,8]{1,0}"), **narrowed).bytes == 64 * 8 * (4 + 2)


def test_copies_and_transposes_count_whole_wherever_they_are():
    size = 64 * 8 * 4
    assert read("f32[64,8]{0,1} copy(%0)").copied == 2 * size
    assert read("f32[8,64]{1,0} transpose(%0), dimensions={1,0}").copied == 2 * size
    turned = fused("%t = f32[8,64]{1,0} transpose(%p0), dimensions={1,0}", "ROOT %n = f32[8,64]{1,0} negate(%t)")
    assert read(fusion("f32[8,64]{1,0}"), **turned).copied == 2 * size
    in_a_product = fused("%t = f32[8,64]{1,0} transpose(%p0)", "ROOT %n = f32[8,8]{1,0} dot(%t, %p0), contracting")
    assert read(fusion("f32[8,8]{1,0}"), **in_a_product).copied == 0
    started = read(fusion("((f32[64,8]{1,0}), f32[8,64]{1,0}, u32[])").replace("fusion(", "fusion-start("), **turned)
    assert started.copied == 2 * size


def test_every_array_in_memory_is_seen_and_none_inside_a_fusion():
    inside = fused("%b = f32[64,99]{1,0} broadcast(%p0)", "ROOT %r = (f32[8]{0}, bf16[4,2]{1,0}) reduce(%b)")
    text = program("f32[64,8]{1,0} parameter(0)", fusion("(f32[8]{0}, bf16[4,2]{1,0})"), **inside)
    assert held(text) == {("f32", (64, 8)), ("f32", (8,)), ("bf16", (4, 2))}


@pytest.mark.slow
@pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
@pytest.mark.parametrize(("name", "devices", "rows"), [("llama_1b", 1, 8), ("llama_8b", 8, 1)])
def test_the_step_that_an_h100_would_run(name, devices, rows):
    """With `rows` of 4096 or 8192 tokens on each device; stage 3 for 8B."""
    asked = {"mesh": f"{devices}x1x1", "train.global_batch_size": str(rows * devices)}
    asked |= {"model.remat": "none", "model.unroll_layers": "false"}
    report = explain(load(name, asked), "h100")
    found, model = report.kernels, report.config.model

    assert (found.flash_forward, found.flash_backward) == (model.layers, model.layers)
    assert found.products.keys() == {"bf16"}

    logits = {(dtype, math.prod(s) // model.vocab) for dtype, s in held(report.program.text) if model.vocab in s}
    tables = {(dtype, model.embed // parts) for dtype in ("bf16", "f32") for parts in (1, devices)}
    assert logits <= {("bf16", CHUNK_ROWS["gpu"]), *tables}
    assert max(CHUNK_ROWS["gpu"], model.embed) < rows * model.sequence

    # Over several devices XLA sends a layer's gradients in the next turn of the loop, and copies them for that: in less
    # time than reductions take with nothing beside them (benchmarks/results/2026-11-29-flags-target.txt).
    assert found.copied < (0.02 if devices == 1 else 0.1) * found.bytes
    temporaries = report.memory.total - report.memory.arguments
    assert 0.85 < temporaries / report.program.temporary_bytes < 1.15
