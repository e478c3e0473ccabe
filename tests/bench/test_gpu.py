"""`bench gpu`, whose parts are the same on a CPU: what it measures, what it tells, and what of it fails alone."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxdist.bench import __main__ as bench
from jaxdist.bench import gpu, gpu_child, gpu_parts, measuring
from jaxdist.bench.gpu_parts import ATTENTION, MATMUL, OTHER, PARTS_OF_A_STEP, part
from jaxdist.bench.gpu_text import lines
from jaxdist.cluster import runtime
from jaxdist.config import ModelConfig
from jaxdist.planning.timing import flops_per_token
from jaxdist.planning.trace import COMPUTE, COPY, Kernel
from jaxdist.request import load, outcome
from jaxdist.training.run import Run

TINY = """
[model]
family = "llama"
layers = 3
embed = 32
heads = 4
kv_heads = 2
mlp = 48
vocab = 300
sequence = 32
"""


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
        found = gpu_child.step(tiny, gpu.ALIKE, rows=2, unroll=unroll, warmup=0, repeats=3, traced=0)
        losses.append(found["loss"])
        run = Run(load(tiny, {**gpu.ALIKE, "train.global_batch_size": "2"}))
        run.steps, run.forward.unroll = 1, unroll
        with jax.set_mesh(run.mesh):
            loops.append(run.lower().as_text().count("stablehlo.while"))
        assert found["layers"] == ("unrolled" if unroll else "scan")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert loops[1] == loops[0] - 2  # that over the layers, in either pass


def test_rows_are_as_many_as_fit(tiny, monkeypatch):
    """By the prediction first, then by the compiled program, which here needs as many MiB as it has rows."""
    asked = lambda rows: load(tiny, {**gpu.ALIKE, "train.global_batch_size": str(rows)})
    tried = []

    def compile(run):
        tried.append(run.config.train.global_batch_size)
        held = SimpleNamespace(argument_size_in_bytes=0, temp_size_in_bytes=tried[-1] * 2**20)
        return SimpleNamespace(run=run, program=SimpleNamespace(memory_analysis=lambda: held))

    def rows(mebibytes: float, counts=gpu_child.ROWS) -> int:
        monkeypatch.setattr(runtime, "capacity", lambda device: mebibytes * 2**20)
        tried.clear()
        return gpu_child.compiled(asked, counts, False).run.config.train.global_batch_size

    monkeypatch.setattr(measuring.Timed, "compile", compile)
    assert (rows(1000), tried) == (16, [16])
    assert (rows(7), tried) == (4, [16, 8, 4])
    assert (rows(2.2), tried) == (2, [4, 2])  # more are predicted not to fit
    assert (rows(0.01, [8]), tried) == (8, [8])
    with pytest.raises(gpu.RequestError, match=r"one row needs \d+ KiB, and this device has 10 KiB"):
        rows(0.01)


def told_by(monkeypatch, answers: dict) -> list:
    """Answer in the place of the processes; returns what they are asked."""
    questions = []

    def answer(command, asked, environment, limit):
        questions.append((command, asked, environment))
        key = "torch" if "torch_llama" in command[-1] else asked["part"]
        found = answers[key]
        return found(asked, environment) if callable(found) else found

    monkeypatch.setattr(gpu, "_answer", answer)
    return questions


DEVICE = {
    "device": "NVIDIA H200", "capacity_bytes": 13e10, "dtype": "bfloat16", "copy_bytes_per_second": 4e12,
    "matmuls": [{"shape": [8192] * 3, "flops_per_second": 7.2e14}],
    "numerics": [{"what": "attention, d q", "error": 0.004, "bound": 0.03, "fine": True}],
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax", "numpy"), "1"),
}  # fmt: skip


def played(asked, environment) -> tuple[dict, str]:
    """A step of an H200; slower with blocks made again, and no memory where layers are written out."""
    if asked["unroll"]:
        return None, "memory ran out: RESOURCE_EXHAUSTED: so much"
    config = load(asked["config"], {**asked["overrides"], "train.global_batch_size": "8"})
    seconds = 1.25 if config.model.remat == "block" else 1.0
    traced = {MATMUL: 0.7, ATTENTION: 0.1, OTHER: 0.15}
    found = {
        "device": "NVIDIA H200", "rows": 8, "remat": config.model.remat, "layers": "scan", "precision": "bfloat16",
        "step_seconds": seconds, "tokens_per_second": 65536 / seconds, "tokens_per_step": 65536, "mfu": 0.56 / seconds,
        "memory_bytes": 8e10, "predicted_bytes": 9e10, "temporary_bytes": 5e10, "compile_seconds": 30.0, "loss": 11.5,
        "attention": "cuDNN flash attention", "flops_per_token": 8e9, "flops_formula": "6 x", "peak_flops": 989e12,
        "sizes": config.model.model_dump(), "torch": gpu_child._for_torch(config, 13),
    }  # fmt: skip
    longest = [{"name": "nvjet", "part": MATMUL, "calls": 112.0, "seconds": 0.4}]
    return found | ({"kernels": {"seconds": traced, "longest": longest}} if asked["traced"] else {}), ""


TORCH = {
    "torch": "2.11.0", "compiled": True, "rows": 8, "step_seconds": 1.2, "tokens_per_second": 54613.0, "loss": 11.51,
    "memory_bytes": 9e10,
}  # fmt: skip


def test_all_of_it_as_on_a_gpu(monkeypatch, tmp_path, capsys):
    """With answers that are made up: which processes are asked for what, and what is told and written."""
    torch = lambda asked, environment: (None, "triton") if asked["compile"] else (TORCH | {"compiled": False}, "")
    questions = told_by(monkeypatch, {"device": (DEVICE, ""), "step": played, "torch": torch})
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu, "refused", lambda flags: "Unknown flag" if "triton" in flags else "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    out = tmp_path / "gpu.json"
    assert outcome(bench.main, ["gpu", f"--out={out}", "--json"]) == 1
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert json.loads(out.read_text()) == found
    assert found["command"] == f"python -m jaxdist.bench gpu --out={out} --json"
    assert found["problems"] == ["torch: triton", "unrolled layers: memory ran out: RESOURCE_EXHAUSTED: so much"]
    assert found["notes"] == ["--xla_gpu_enable_triton_gemm=false is unknown to this jaxlib, and left out"]
    assert [one["name"] for one in found["models"]] == ["llama_1b-128", "llama_3b", "llama_1b"]
    assert [one["name"] for one in found["variants"]] == [
        "remat dots", "remat block", "latency hiding scheduler", "no recomputation by XLA", "no command buffers",
    ]  # fmt: skip

    steps = [(asked, environment) for _, asked, environment in questions if asked.get("part") == "step"]
    assert steps[0][0]["overrides"] == gpu.ALIKE | {"model.heads": "16"}
    changed = [asked["rows"] for asked, _ in steps]
    assert changed == [0, 8, 0, 8, 8, 8, 8, 8, 0]  # those of the first
    assert [asked["repeats"] for asked, _ in steps] == [10, 5, 10, 5, 5, 5, 5, 5, 10]
    flags = [environment["XLA_FLAGS"] for _, environment in steps]
    assert flags[5] == "--xla_mine=1 --xla_gpu_enable_latency_hiding_scheduler=true"
    assert flags[0] == flags[-1] == "--xla_mine=1"
    assert {environment["XLA_CLIENT_MEM_FRACTION"] for _, _, environment in questions} == {"0.92"}

    text = (tmp_path / "gpu.txt").read_text()
    for line in (
        "  in torch, eager  8     1200.00 ms  54,613    44.2%  83.8 GiB",
        "llama_1b-128: 1.200 times the tokens per second of torch; losses of the last step 11.5000 here, 11.5100 there",
        "remat block               1250.00 ms  52,429    44.8%  0.800",
        "matrix product 8192x8192x8192: 720 TFLOP/s",
        "no kernel runs                               50.00         50.00     50.00",
        "step                                         1000.00       1000.00   1000.00",
        "nvjet                            112           400.000 ms  matmul",
    ):
        assert line in text


def test_parts_end_in_time_and_one_that_dies_takes_no_other_with_it(monkeypatch):
    """In true processes: one sleeps, one raises, one is killed, one answers."""
    run = lambda code, limit=60: gpu._answer([sys.executable, "-c", code], {"n": 3}, dict(gpu.os.environ), limit)
    assert run("import time; time.sleep(60)", limit=0.5) == (None, "ended after 0 s")
    assert run("raise ValueError('no such thing')") == (
        None, "its process ended with 1; its last words: ValueError: no such thing",
    )  # fmt: skip
    killed = "its process was killed by SIGKILL; its last words: nothing"
    assert run("import os; os.kill(os.getpid(), 9)") == (None, killed)
    good = (
        "import json, sys; n = json.load(open(sys.argv[1]))['n']; json.dump({'value': n + 1}, open(sys.argv[2], 'w'))"
    )
    assert run(good) == (4, "")


def test_what_does_not_begin_in_time_is_left_out(monkeypatch, capsys):
    told_by(monkeypatch, {})
    assert outcome(bench.main, ["gpu", "--seconds=1", "--parts=numerics,models"]) == 0
    out = capsys.readouterr().out
    assert "numerics: left out after 0 s; raise --seconds, or give fewer --parts" in out
    assert "llama_3b: left out" in out


def test_wrong_numerics_are_told(monkeypatch, capsys):
    wrong = {"what": "attention, d k", "error": 0.31, "bound": 0.03125, "fine": False}
    told_by(monkeypatch, {"device": (DEVICE | {"numerics": [wrong]}, "")})
    assert outcome(bench.main, ["gpu", "--parts=numerics"]) == 1
    told = "d k is off by 3.1e-01 of its largest value from plain float32, where bfloat16 explains 3.1e-02"
    assert told in " ".join(capsys.readouterr().out.split())


def test_outside_of_the_repository_it_says_where_the_part_in_torch_is(monkeypatch, capsys, tmp_path):
    told_by(monkeypatch, {"step": played})
    monkeypatch.setattr(gpu, "TORCH", tmp_path / "torch_llama.py")
    assert outcome(bench.main, ["gpu", "--parts=models,torch", "--models=llama_3b"]) == 0
    assert "benchmarks/torch_llama.py is not part of the installed package" in capsys.readouterr().out


def test_without_torch_the_rest_runs(monkeypatch, capsys):
    told_by(monkeypatch, {"step": played})
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    assert outcome(bench.main, ["gpu", "--parts=models,torch", "--models=llama_3b"]) == 0
    assert "torch is not installed, so it is not compared: pip install 'jaxdist[torch]'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--parts numerics,torhc", "--parts: there is no part 'torhc'; did you mean 'torch'?"),
        ("--models llama_2b", "config 'llama_2b' is neither a file nor a shipped config; did you mean 'llama_"),
        ("--models cnn_digits", "--models: cnn_digits classifies images; name models of text"),
        ("--out .", "--out '.' is a folder; name a file in it, such as ./gpu.json"),
        ("--out a.txt", "--out 'a.txt' is no JSON file; name it a.json"),
        ("--model.layers 2", "--model.layers has no effect on this command"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(argv, sentence, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_answer", None)
    assert outcome(bench.main, ["gpu", *argv.split()]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_on_a_cpu(tiny, tmp_path, capsys):
    """Numerics and a step with its trace, in processes of their own."""
    out = tmp_path / "gpu.json"
    argv = [f"--models={tiny}", "--parts=numerics,models", "--rows=2", "--repeats=2", "--warmup=1", "--seconds=900"]
    assert outcome(bench.main, ["gpu", *argv, f"--out={out}"]) == 0, capsys.readouterr()
    found = json.loads(out.read_text())
    assert found["problems"] == []
    assert {one["fine"] for one in found["device"]["numerics"]} == {True}
    (one,) = found["models"]
    assert (one["rows"], one["layers"], one["tokens_per_step"], one["mfu"]) == (2, "scan", 64, None)
    assert one["tokens_per_second"] == pytest.approx(64 / one["step_seconds"])
    assert sum(one["kernels"]["seconds"].values()) > 0
    assert len(one["kernels"]["longest"]) == 10
    assert "\n".join(lines(found)) == capsys.readouterr().out.strip("\n")
    assert Path(tmp_path / "gpu.txt").read_text().strip("\n") == "\n".join(lines(found))
