"""The modelled time of a program that is written by hand."""

from pathlib import Path

import pytest

from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.planning import clusters, collective_time

FOLDER = Path(__file__).parents[2] / "benchmarks"

LISTS = """
FileNames
1 "/there/jaxdist/models/norms.py"
2 "/there/jaxdist/models/loss.py"
3 "/there/jaxdist/models/positions.py"

FunctionNames
1 "_rms_norm"
2 "cross_entropy"
3 "angles"

FileLocations
1 {file_name_id=1 function_name_id=1 line=72}
2 {file_name_id=2 function_name_id=2 line=8}
3 {file_name_id=3 function_name_id=3 line=9}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=3}
"""

ARRAY = "bf16[4096,4096]{1,0}"
GATHERED = "bf16[8,4096,4096]{2,1,0}"
GROUPS = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
CUDNN = '"intermediate_tensor_shape": {"dimensions": ["2", "4", "1024", "1024"]}, "mask_type": "CAUSAL"'

ZERO = "  %zero = bf16[] constant(0)"
PRODUCT = f"{ARRAY} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
NORM = f"{ARRAY} add(%x, %x), metadata={{stack_frame_id=2}}"
"""Traced from a line of norms.py, which loss.py called."""
FUSED = f"""%fused (d: f32[8]) -> f32[8] {{
  %d.0 = {ARRAY} parameter(0)
  %d.1 = {ARRAY} add(%d.0, %d.0), metadata={{stack_frame_id=1}}
  %d.2 = {ARRAY} add(%d.1, %d.0), metadata={{stack_frame_id=1}}
  %d.3 = {ARRAY} add(%d.2, %d.0), metadata={{stack_frame_id=1}}
  %d.4 = {ARRAY} add(%d.3, %d.0), metadata={{stack_frame_id=3}}
}}"""
ROTARY = f"{ARRAY} fusion(%x), calls=%fused, metadata={{stack_frame_id=3}}"
UNNAMED = f"{ARRAY} fusion(%x), calls=%fused"
"""Three of its four parts are of the loss."""
ZEROS = f"{ARRAY} broadcast(%zero), dimensions={{}}"
ATTENTION = (
    "(bf16[2,1024,4,128]{3,2,1,0}, f32[2,4,1024]{2,1,0}) custom-call(%zero), "
    f'custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={{{CUDNN}}}'
)
START = f"({ARRAY}, {GATHERED}) all-gather-start(%x), {GROUPS}"
"""The first instruction of a body is called %0, the second %1, ..."""
DONE = f"{GATHERED} all-gather-done(%0)"
SECOND_DONE = f"{GATHERED} all-gather-done(%1)"


def program(*body: str) -> str:
    """A program that runs `body` three times."""
    named = [f"  %{place} = {instruction}" for place, instruction in enumerate(body)]
    loop = f'{ARRAY} while(%p), body=%body, condition=%until, backend_config={{"known_trip_count":{{"n":"3"}}}}'
    parts = [
        f"HloModule m, is_scheduled=true, num_partitions=8\n{LISTS}\n{FUSED}",
        "\n".join(["%body (a: f32[8]) -> f32[8] {", f"  %x = {ARRAY} parameter(0)", ZERO, *named, "}"]),
        "%until (b: f32[8]) -> f32[8] {\n  %true = pred[] constant(true)\n}",
        f"ENTRY %main (c: f32[8]) -> f32[8] {{\n  %p = {ARRAY} parameter(0)\n  %loop = {loop}\n}}",
    ]
    return "\n\n".join(parts)


@pytest.fixture
def roofline(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import roofline

    return roofline


@pytest.fixture
def modelled(roofline):
    def of(*body: str) -> dict[str, float]:
        """Microseconds by kind, of one turn of the loop."""
        time = roofline.Roofline(program(*body), abstract_mesh(parse_mesh("8x1x1"))).time
        return {kind: 1e6 / 3 * seconds for kind, seconds in time.by_kind.items()}

    return of


LAUNCH = 2
MEMORY = 0.92 * 3.35e6
"""Bytes in a microsecond."""

EXPOSED = "exposed communication"
PRODUCT_TIME = 2 * 4096**3 / 790e6 + LAUNCH
GATHER = 2 * 8 * 4096**2
GATHER_TIME = 1e6 * float(collective_time.seconds("all-gather", GATHER, 8, 8, clusters.cluster("h100-ndr")))


def test_kernels_take_their_flops_or_their_bytes(modelled):
    """The norm reads an array twice and writes one, a fusion once; attention has half of the scores, by its mask."""
    found = modelled(PRODUCT, NORM, ROTARY, UNNAMED, ZEROS, ATTENTION)
    array = 2 * 4096**2
    assert found == pytest.approx(
        {
            "matmuls": PRODUCT_TIME,
            "norms and residual": 3 * array / MEMORY + LAUNCH,
            "rotary positions; query, key and value": 2 * array / MEMORY + LAUNCH,
            "cross-entropy and tables": 2 * array / MEMORY + LAUNCH,
            "zeros": (array + 2) / MEMORY + LAUNCH,
            "attention, backward": 10 * 2 * 4 * 1024**2 * 128 / 2 / 480e6 + LAUNCH,
        },
        rel=1e-3,
    )


def test_a_collective_is_exposed_as_far_as_it_takes_longer(modelled):
    """A product before its start or after its done hides nothing of it."""
    assert 2 * PRODUCT_TIME < GATHER_TIME < 4 * PRODUCT_TIME
    assert modelled(START, PRODUCT, DONE, PRODUCT)[EXPOSED] == pytest.approx(GATHER_TIME - PRODUCT_TIME)
    assert EXPOSED not in modelled(START, *[PRODUCT] * 4, DONE)
    waited_for = modelled(PRODUCT, f"{GATHERED} all-gather(%x), {GROUPS}", PRODUCT)
    assert waited_for[EXPOSED] == pytest.approx(GATHER_TIME)


def test_collectives_run_one_after_the_other(modelled):
    found = modelled(START, START, PRODUCT, DONE, SECOND_DONE)
    assert found[EXPOSED] == pytest.approx(2 * GATHER_TIME - PRODUCT_TIME)


def test_what_cannot_be_modelled_is_an_error(modelled):
    with pytest.raises(ValueError, match="no rate of matmuls of f64 is known"):
        modelled("f64[8,8]{1,0} constant({...})", "f64[8,8]{1,0} dot(%0, %0), lhs_contracting_dims={1}")
    with pytest.raises(ValueError, match="attention of a form"):
        modelled(ATTENTION.replace("CAUSAL", "PADDING"))


def test_a_row_may_be_a_request_of_ones_own(roofline):
    mesh = "data=4,expert=2"
    assert roofline.request_of(f"olmoe_1b_7b mesh={mesh} parallel.zero=3") == (
        "olmoe_1b_7b",
        {"mesh": mesh, "parallel.zero": "3"},
    )
    assert roofline.request_of("8b block") == roofline.ROWS["8b block"]
    assert roofline.said("8b loop").startswith("llama_8b precision=bfloat16 mesh=8x1x1 ")
