"""What a part of `bench gpu` measures in its process: the same on a CPU."""

from types import SimpleNamespace

import jax
import pytest

from jaxdist.bench import gpu, gpu_child, gpu_parts, measuring
from jaxdist.bench.gpu_order import ALIKE
from jaxdist.bench.gpu_parts import ATTENTION, MATMUL, OTHER, PARTS_OF_A_STEP, part
from jaxdist.bench.measuring import ignore
from jaxdist.cluster import runtime
from jaxdist.config import ModelConfig
from jaxdist.planning.timing import flops_per_token
from jaxdist.programs import trace
from jaxdist.programs.trace import COMPUTE, COPY, Kernel
from jaxdist.request import load
from jaxdist.training import profile
from jaxdist.training.run import Run
from tests.bench.tiny import TINY, last


@pytest.fixture
def tiny(tmp_path) -> str:
    (tmp_path / "tiny.toml").write_text(TINY)
    return str(tmp_path / "tiny.toml")


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", MATMUL),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_kernel", MATMUL),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_nn_align8>", MATMUL),
        ("gemm_fusion_dot_general_12", MATMUL),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", MATMUL),
        ("dot.132", MATMUL),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_4x1x1", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_31_64x128x128", ATTENTION),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128, true>", ATTENTION),
        ("loop_multiply_fusion_3", OTHER),
        ("input_reduce_fusion_14", OTHER),
        ("MemcpyD2D", OTHER),
        ("wrapped_transpose", OTHER),
    ],
)
def test_what_a_kernel_is_for(kernel, what):
    assert part(kernel) == what


def test_the_time_of_a_step_counts_once():
    """Where kernels run side by side a product counts first, then attention."""
    ran = [
        Kernel("0", "nvjet_a", COMPUTE, 0, 100),
        Kernel("0", "sdpa_b", COMPUTE, 60, 140),
        Kernel("0", "loop_c", COMPUTE, 130, 150),
        Kernel("0", "loop_c", COMPUTE, 160, 170),
        Kernel("0", "MemcpyD2D", COPY, 40, 50),
    ]
    found = gpu_parts.shares(ran, steps=2)
    assert found["seconds"] == pytest.approx({MATMUL: 50e-6, ATTENTION: 20e-6, OTHER: 10e-6})
    assert [(row["name"], row["part"], row["calls"]) for row in found["longest"]] == [
        ("nvjet_a", MATMUL, 0.5),
        ("sdpa_b", ATTENTION, 0.5),
        ("loop_c", OTHER, 1),
        ("MemcpyD2D", OTHER, 0.5),
    ]
    assert found["longest"][2]["seconds"] == pytest.approx(15e-6)
    with pytest.raises(ValueError, match="no kernels"):
        gpu_parts.shares([], 2)


def test_the_gap_adds_up():
    """Of 1000 tokens in 2 s: products of 0.5 s, that the measured rate makes in 0.4."""
    model = ModelConfig(family="llama", layers=2, embed=64, heads=4, mlp=96, vocab=512, sequence=64)
    attention = 6 * 2 * 64 * 64
    weights, kernels = 1000 * (flops_per_token(model) - attention), {MATMUL: 0.5, ATTENTION: 0.3, OTHER: 0.7}
    found = gpu_parts.gap(model, 1000, 2.0, kernels, weights / 0.4, weights / 0.13)
    assert list(found) == list(PARTS_OF_A_STEP)
    assert list(found.values())[:6] == pytest.approx([0.4, 0.1, 0.3, 0.7, 0.5, 2.0])
    assert sum(list(found.values())[:5]) == pytest.approx(found["step"])
    assert found["step at 65% of the peak"] == pytest.approx(0.2 * (1 + 1000 * attention / weights))
    assert gpu_parts.gap(model, 1000, 2.0, kernels, 1e9, None)["step at 65% of the peak"] is None


@pytest.mark.slow
def test_layers_written_out_learn_the_same_without_a_loop(tiny):
    losses, loops = [], []
    for unroll in False, True:
        options = {**ALIKE, "model.unroll_layers": str(unroll).lower()}
        found = last(gpu_child.step(ignore, tiny, options, rows=2, warmup=0, repeats=3, traced=0))
        losses.append(found["loss"])
        run = Run(load(tiny, {**options, "train.global_batch_size": "2"}))
        run.steps = 1
        with jax.set_mesh(run.mesh):
            loops.append(run.lower().as_text().count("stablehlo.while"))
        assert found["layers"] == ("unrolled" if unroll else "scan")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert loops[1] == loops[0] - 2  # that over the layers, in either pass


def no(*_: object, **__: object):
    """A profiler on a machine where it does not work."""
    raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["begin_trace", "stop_trace", "newest_trace", "kernels"])
def test_a_profiler_that_fails_costs_nothing_else(fails, tiny, one_step, monkeypatch):
    monkeypatch.setattr(gpu_child, "compiled", lambda *_: one_step)
    if fails == "stop_trace":
        monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
        monkeypatch.setattr(jax.profiler, "stop_trace", no)
    elif fails == "newest_trace":  # as it finds no file: nothing was written
        monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    else:
        where = profile if fails == "begin_trace" else trace
        monkeypatch.setattr(where, fails, no)
    phases = []
    first, then = gpu_child.step(phases.append, tiny, ALIKE, rows=2, warmup=1, repeats=2, traced=1)
    assert first["step_seconds"] > 0
    assert "kernels" not in first
    wanted = "arg is an empty sequence" if fails == "newest_trace" else "CUPTI_ERROR"
    assert wanted in then.pop("trace_problem") or "empty" in wanted
    assert then == first | {"kernels": None}
    assert phases == ["compiling", "making the first state", "measuring", "measured", "tracing"]


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "tiny.toml"
    path.write_text(TINY)
    run = Run(load(str(path), {**ALIKE, "train.global_batch_size": "2"}))
    return measuring.Timed.compile(run)


def test_rows_are_as_many_as_fit(tiny, monkeypatch):
    """By the prediction first, then by the compiled program, which here needs as many MiB as it has rows."""
    asked = lambda rows: load(tiny, {**ALIKE, "train.global_batch_size": str(rows)})
    tried = []

    def compile(run):
        tried.append(run.config.train.global_batch_size)
        held = SimpleNamespace(argument_size_in_bytes=0, temp_size_in_bytes=tried[-1] * 2**20)
        return SimpleNamespace(run=run, program=SimpleNamespace(memory_analysis=lambda: held))

    def rows(mebibytes: float, counts=gpu_child.ROWS) -> int:
        monkeypatch.setattr(runtime, "capacity", lambda device: mebibytes * 2**20)
        tried.clear()
        return gpu_child.compiled(asked, counts).run.config.train.global_batch_size

    monkeypatch.setattr(measuring.Timed, "compile", compile)
    assert (rows(1000), tried) == (16, [16])
    assert (rows(7), tried) == (4, [16, 8, 4])
    assert (rows(2.2), tried) == (2, [4, 2])  # more are predicted not to fit
    assert (rows(0.01, [8]), tried) == (8, [8])
    with pytest.raises(gpu.RequestError, match=r"one row needs \d+ KiB, and this device has 10 KiB"):
        rows(0.01)
