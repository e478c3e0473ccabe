"""`bench gpu`, whose parts are the same on a CPU: what it measures, what it tells, and what of it fails alone."""

import importlib
import json
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxdist.bench import __main__ as bench
from jaxdist.bench import gpu, gpu_child, gpu_order, gpu_parts, gpu_process, gpu_runs, measuring
from jaxdist.bench.gpu_order import ALIKE
from jaxdist.bench.gpu_parts import ATTENTION, MATMUL, OTHER, PARTS_OF_A_STEP, part
from jaxdist.bench.gpu_process import Ended
from jaxdist.bench.measuring import ignore
from jaxdist.cluster import runtime
from jaxdist.config import ModelConfig
from jaxdist.planning.timing import flops_per_token
from jaxdist.programs import trace
from jaxdist.programs.trace import COMPUTE, COPY, Kernel
from jaxdist.request import load, outcome
from jaxdist.training import profile
from jaxdist.training.run import Run
from scripts import gpu_session

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


def last(found):
    """What a part has found in the end."""
    return list(found)[-1]


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


def told_by(monkeypatch, answers: dict) -> list:
    """Answer in the place of the processes; returns what they are asked."""
    questions = []

    def run(command, asked, environment, limit):
        questions.append((command, asked, environment))
        found = answers["torch" if "torch_llama" in command[-1] else asked["part"]]
        found = found(asked, environment) if callable(found) else found
        return found if isinstance(found, Ended) else Ended(*found)

    monkeypatch.setattr(gpu_process, "run", run)
    return questions


DEVICE = {
    "device": "NVIDIA H200", "capacity_bytes": 13e10, "dtype": "bfloat16", "copy_bytes_per_second": 4e12,
    "matmuls": [{"shape": [8192] * 3, "flops_per_second": 7.2e14}],
    "attention": [{"size": 128, "forward flops_per_second": 6e14, "forward and backward flops_per_second": 5e14}],
    "numerics": [{"what": "attention, d q", "error": 0.004, "bound": 0.03, "fine": True}],
    **dict.fromkeys(("jax", "jaxlib", "flax", "optax", "numpy"), "1"),
}  # fmt: skip


def played(asked, environment) -> tuple[dict | None, str]:
    """A step of an H200; slower with blocks made again, and no memory where layers are written out."""
    config = load(asked["config"], {**asked["overrides"], "train.global_batch_size": "8"})
    if config.model.unroll_layers:
        return None, "memory ran out: RESOURCE_EXHAUSTED: so much"
    seconds = 1.25 if config.model.remat == "block" else 1.0
    traced = {MATMUL: 0.7, ATTENTION: 0.1, OTHER: 0.15}
    found = {
        "device": "NVIDIA H200", "rows": 8, "remat": config.model.remat, "layers": "scan", "precision": "bfloat16",
        "step_seconds": seconds, "tokens_per_second": 65536 / seconds, "tokens_per_step": 65536, "mfu": 0.56 / seconds,
        "memory_bytes": 8e10, "predicted_bytes": 9e10, "temporary_bytes": 5e10, "compile_seconds": 30.0, "loss": 11.5,
        "attention": "cuDNN flash attention", "flops_per_token": 8e9, "flops_formula": "6 x", "peak_flops": 989e12,
        "sizes": config.model.model_dump(), "torch": gpu_child._for_torch(config, 13),
        "config": asked["config"], "options": asked["overrides"],
    }  # fmt: skip
    longest = [{"name": "nvjet", "part": MATMUL, "calls": 112.0, "seconds": 0.4}]
    return found | ({"kernels": {"seconds": traced, "longest": longest}} if asked["traced"] else {}), ""


PLAYED = played({"traced": 0, "config": "llama_1b", "overrides": {}}, {})

TORCH = {
    "torch": "2.11.0", "compiled": True, "rows": 8, "step_seconds": 1.2, "tokens_per_second": 54613.0, "loss": 11.51,
    "memory_bytes": 9e10,
}  # fmt: skip


def test_all_of_it_as_on_a_gpu(monkeypatch, tmp_path, capsys):
    """With answers that are made up: which processes are asked for what, and what is told and written."""
    told = {part: ({"told": f"{part} went well"}, "") for part in (*gpu_runs.PARTS, "decode")}
    torch = lambda asked, environment: (None, "triton") if asked["attention"] == "cudnn" else (TORCH, "")
    steps = lambda asked, environment: Ended(*played(asked, environment), {"sm_mhz": 1755.0, "celsius": 61.0})
    questions = told_by(monkeypatch, told | {"device": (DEVICE, ""), "step": steps, "torch": torch})
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu, "refused", lambda flags: "Unknown flag" if "triton" in flags else "")
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    out = tmp_path / "gpu.json"
    assert outcome(bench.main, ["gpu", f"--out={out}", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == found
    assert found["commands"] == [f"python -m jaxdist.bench gpu --out={out} --json"]
    failed = {one["name"]: (one["problem"], one["attempts"]) for one in found["parts"] if one["problem"]}
    told = "memory ran out: RESOURCE_EXHAUSTED: so much"
    assert failed == {"torch, cuDNN attention": ("triton", 2), "unrolled layers": (told, 2)}
    assert found["notes"] == ["--xla_gpu_enable_triton_gemm=false is unknown to this jaxlib, and left out"]
    names = [one["name"] for one in found["parts"]]
    assert names[:6] == [
        "llama_1b-128", "train", "torch, cuDNN attention", "torch, flash attention", "unrolled layers", "numerics",
    ]  # fmt: skip
    assert names[-1] == "llama_1b"

    steps = [(asked, environment) for _, asked, environment in questions if asked.get("part") == "step"]
    assert steps[0][0]["overrides"] == ALIKE | {"model.heads": "16"}
    assert {asked["rows"] for asked, _ in steps} == {0, 8, 32}  # as many as fit, those of the first, and four times
    assert {asked["repeats"] for asked, _ in steps} == {5, 10}
    assert "--xla_mine=1 --xla_gpu_enable_latency_hiding_scheduler=true" in {one["XLA_FLAGS"] for _, one in steps}
    assert {environment["XLA_CLIENT_MEM_FRACTION"] for _, _, environment in questions} == {"0.92"}
    caches = {environment["JAX_COMPILATION_CACHE_DIR"] for _, _, environment in questions}
    assert caches == {str(tmp_path / "gpu.work" / "programs")}

    # Where the machine is busy, even what is made up takes a second.
    text = re.sub(r"\| done \| \d+ \|", "| done | 0 |", (tmp_path / "gpu.md").read_text())
    for line in (
        "| llama_1b-128 | done | 0 | 1000.00 ms, 65,536 tokens/s, MFU 56.0% | 1755 |  |  | 61 |",
        "| evaluate | done | 0 | evaluate went well |",
        "  torch, flash attention  8     1200.00 ms  54,613    44.2%  83.8 GiB",
        "llama_1b-128: 1.200 times the tokens per second of torch, flash attention; losses of the last step 11.5000",
        "remat block               8     1250.00 ms  52,429    44.8%  0.800",
        "matrix product 8192x8192x8192: 720 TFLOP/s",
        "attention, heads of 128: 600 TFLOP/s forward, 500 TFLOP/s forward and backward",
        "no kernel runs                               50.00         50.00     50.00",
        "step                                         1000.00       1000.00   1000.00",
        "nvjet                            112           400.000 ms  matmul",
    ):
        assert line in text


def test_every_question_is_a_request_that_can_be_answered():
    """A misspelt option would be found out on the GPU."""
    cases = {name: gpu._case(name) for name in ("llama_1b-128", "llama_3b")}
    parts = list(gpu_order.in_order(cases, 8))
    assert len({one.name for one in parts}) == len(parts)
    assert {one.group for one in parts} == set(gpu_order.GROUPS)
    for one in parts:
        if "overrides" in one.question:
            load(one.question["config"], {**one.question["overrides"], "train.global_batch_size": "8"})


def failing_in_cudnn(asked, environment) -> tuple[dict | None, str]:
    if asked["overrides"].get("model.attention") == "blocks":
        return played(asked, environment)
    return None, "its process ended with 1 while compiling; its last words: XlaRuntimeError: CUDNN_STATUS_BAD_PARAM"


def test_where_cudnn_fails_attention_runs_in_blocks_from_then_on(monkeypatch, capsys):
    questions = told_by(monkeypatch, {"step": failing_in_cudnn})
    assert outcome(bench.main, ["gpu", "--parts=models,remat", "--models=llama_1b,llama_3b", "--json"]) == 0
    forms = [asked["overrides"].get("model.attention") for _, asked, _ in questions]
    assert forms == [None, "blocks", "blocks", "blocks", "blocks", "blocks"]
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert note.startswith(
        "from llama_1b on, attention runs in blocks, because with cuDNN's it failed: its process ended"
    )


def test_a_model_that_hangs_is_tried_with_attention_in_blocks(monkeypatch, capsys):
    """A hang, or a signal, names no library; an error that names another one is not cuDNN's."""
    hangs = Ended(None, "ended after 230 s while measuring (for 200 s); its last words: hm", killed=True)
    blocks = lambda asked: asked["overrides"].get("model.attention") == "blocks"
    answer = lambda asked, environment: played(asked, environment) if blocks(asked) else hangs
    questions = told_by(monkeypatch, {"step": answer})
    assert outcome(bench.main, ["gpu", "--parts=models", "--models=llama_1b", "--json"]) == 0
    assert [blocks(asked) for _, asked, _ in questions] == [False, True]
    assert "attention runs in blocks" in json.loads(capsys.readouterr().out)["notes"][0]
    raises = Ended(None, "its process ended with 1; its last words: ValueError: no")
    questions = told_by(monkeypatch, {"step": raises})
    assert outcome(bench.main, ["gpu", "--parts=models", "--models=llama_1b", "--json"]) == 1
    assert [blocks(asked) for _, asked, _ in questions] == [False, False]


def test_a_second_attempt_costs_nothing_that_the_first_has_found(monkeypatch, capsys):
    """The trace hangs; the second time, the step has no time either."""
    found, _ = PLAYED
    answers = [Ended(found, "ended after 99 s while tracing", {"watts": 690.5}), Ended(None, "ended after 30 s")]
    told_by(monkeypatch, {"step": lambda *_: answers.pop(0)})
    assert outcome(bench.main, ["gpu", "--parts=models", "--models=llama_1b", "--json"]) == 1
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert part["value"] == found
    assert part["sensors"] == {"watts": 690.5}
    assert (part["problem"], part["state"], part["attempts"]) == ("ended after 99 s while tracing", "failed", 2)


def test_a_full_disk_costs_no_part(monkeypatch, tmp_path, capsys):
    """Neither where a part would write, nor where the result would."""

    def full(*_: object, **__: object):
        raise OSError(28, "No space left on device")

    told_by(monkeypatch, {"step": lambda asked, _: full() if asked["overrides"]["model.remat"] == "dots" else PLAYED})
    monkeypatch.setattr(gpu, "write_whole", full)
    argv = ["gpu", f"--out={tmp_path / 'gpu.json'}", "--parts=remat", "--models=llama_1b", "--json"]
    assert outcome(bench.main, argv) == 1
    told = capsys.readouterr()
    problems = [one["problem"] for one in json.loads(told.out)["parts"]]
    assert problems == ["OSError: [Errno 28] No space left on device", "", ""]
    assert "problem: --out: OSError: [Errno 28] No space left on device" in told.err


def test_a_step_that_runs_out_of_memory_is_measured_with_fewer_rows(monkeypatch):
    dropped = []

    def compiled(config_of, counts):
        sizes = SimpleNamespace(train=SimpleNamespace(global_batch_size=counts[0]))
        return SimpleNamespace(run=SimpleNamespace(config=sizes), drop=lambda: dropped.append(counts[0]))

    def together(timed, warmup, repeats, note):
        if timed[0].run.config.train.global_batch_size > 4:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory while trying to allocate")

    monkeypatch.setattr(gpu_child, "compiled", compiled)
    monkeypatch.setattr(measuring, "measure_together", together)
    timed = gpu_child.measured(ignore, None, gpu_child.ROWS, 1, 2)
    assert (timed.run.config.train.global_batch_size, dropped) == (4, [16, 8])
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        gpu_child.measured(ignore, None, (8,), 1, 2)


def test_without_the_first_model_its_variants_run(monkeypatch, capsys):
    dies = lambda asked, environment: played(asked, environment) if not asked["traced"] else (None, "ended after 400 s")
    questions = told_by(monkeypatch, {"step": dies})
    assert outcome(bench.main, ["gpu", "--parts=models,torch,remat", "--models=llama_1b"]) == 1
    assert [asked["rows"] for _, asked, _ in questions] == [0, 0, 0, 0, 0]
    out = capsys.readouterr().out
    assert "remat block    8     1250.00 ms  52,429    44.8%" in out
    assert "torch, flash attention: left out, because nothing is known of the first model" in out


def test_the_same_command_goes_on_and_ends_with_what_failed(monkeypatch, tmp_path, capsys):
    """The bench is killed in its second part; the next one begins with the third, and tries the second at the end."""
    out = tmp_path / "gpu.json"
    argv = ["gpu", f"--out={out}", "--parts=models,remat", "--models=llama_1b"]

    def killed(asked, environment):
        if asked["overrides"]["model.remat"] == "dots":
            raise KeyboardInterrupt
        return played(asked, environment)

    told_by(monkeypatch, {"step": killed})
    with pytest.raises(KeyboardInterrupt):
        bench.main(argv)
    states = [(one["name"], one["state"]) for one in json.loads(out.read_text())["parts"]]
    assert states[:2] == [("llama_1b", "done"), ("remat dots", "running")]
    questions = told_by(monkeypatch, {"step": played})
    assert outcome(bench.main, [*argv, "--seconds=900"]) == 0
    assert [asked["overrides"]["model.remat"] for _, asked, _ in questions] == ["block", "offload", "dots"]
    assert len(json.loads(out.read_text())["commands"]) == 2
    assert outcome(bench.main, [*argv, "--rows=4"]) == 2
    assert "holds a result with other --rows; ask for the same" in capsys.readouterr().err
    out.write_text("{}")
    assert outcome(bench.main, argv) == 2
    assert "exists and is no result of bench gpu" in capsys.readouterr().err


PHASED = """
import sys, time, json, os, signal
sys.path.insert(0, {root!r})
from jaxdist.bench.gpu_process import Answer
told = Answer(sys.argv[2])
told.phase("measuring")
print("warming up", flush=True)
{measure}
told.write(value=7)
told.phase("tracing")
print("hm", flush=True)
{then}
"""


def run_code(code: str, limit: float = 60, environment=None) -> Ended:
    return gpu_process.run([sys.executable, "-c", code], {"n": 3}, environment or dict(gpu.os.environ), limit)


def phased(then: str, measure: str = "") -> str:
    return PHASED.format(root=str(Path(gpu.__file__).parents[2]), then=then, measure=measure)


def test_parts_end_in_time_and_one_that_dies_takes_no_other_with_it(monkeypatch):
    """In true processes: one sleeps, one raises, one is killed, one answers."""
    assert re.fullmatch(
        r"ended after \d+ s; its last words: nothing", run_code("import time; time.sleep(60)", 0.5).problem
    )
    assert run_code("raise ValueError('no such thing')").problem == (
        "its process ended with 1; its last words: ValueError: no such thing"
    )
    killed = "its process was killed by SIGKILL; its last words: nothing"
    assert run_code("import os; os.kill(os.getpid(), 9)").problem == killed
    good = (
        "import json, sys; n = json.load(open(sys.argv[1]))['n']; json.dump({'value': n + 1}, open(sys.argv[2], 'w'))"
    )
    assert run_code(good) == Ended(4, "")


def test_a_part_that_dies_leaves_what_it_found_its_phase_and_its_last_words(monkeypatch):
    died = run_code(phased("os.kill(os.getpid(), signal.SIGSEGV)"))
    assert died.value == 7
    assert re.fullmatch(
        r"its process was killed by SIGSEGV while tracing \(for \d+ s\); its last words: hm", died.problem
    )
    monkeypatch.setitem(gpu_process.PATIENCE, "tracing", 0.3)
    hung = run_code(phased("time.sleep(60)"))
    assert hung.value == 7
    assert re.fullmatch(r"ended after \d+ s while tracing \(for \d+ s\); its last words: hm", hung.problem)


def test_clocks_power_and_temperature_are_those_of_the_measurement(tmp_path, monkeypatch):
    """An nvidia-smi that is hot while the part measures, and idle for longer."""
    fake, idle, samples = tmp_path / "nvidia-smi", tmp_path / "idle", tmp_path / "samples"
    fake.write_text(
        f"#!{sys.executable}\nimport datetime, os, time\nprint('Unable to determine', flush=True)\n"
        f"samples = open({str(samples)!r}, 'a', buffering=1)\n"
        "while True:\n"
        f"    values = (345, 2619, '[N/A]', 30) if os.path.exists({str(idle)!r}) else (1755, 2619, 690.5, 65)\n"
        "    now = datetime.datetime.now().strftime('%Y/%m/%d %H:%M:%S.%f')[:-3]\n"
        "    print(now, *values, sep=', ', flush=True)\n"
        "    print('one', file=samples)\n"
        "    time.sleep(0.02)\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{gpu.os.environ['PATH']}")

    def sampled(times: int) -> str:
        known = f"len(open({str(samples)!r}).readlines())"
        return f"open({str(samples)!r}, 'a').close(); end = {known} + {times}\nwhile {known} < end: time.sleep(0.01)"

    ended = run_code(phased(f"open({str(idle)!r}, 'w').close()\n{sampled(60)}", measure=sampled(20)))
    assert ended.sensors == {"sm_mhz": 1755, "memory_mhz": 2619, "watts": 690.5, "celsius": 65}


def test_a_part_dies_with_the_bench(tmp_path):
    """An orphan would keep the memory of the GPU from the parts after it."""
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import os, sys; from jaxdist.bench import gpu_process\n"
        f"gpu_process.run([sys.executable, '-c', {child!r}], {{}}, dict(os.environ), 60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(gpu.__file__).parents[2])
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while Path(f"/proc/{pid.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid.read_text()}").exists()


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
    monkeypatch.setattr(gpu, "TORCH_FILE", tmp_path / "torch_llama.py")
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
    monkeypatch.setattr(gpu_process, "run", None)
    assert outcome(bench.main, ["gpu", *argv.split()]) == 2
    assert sentence in capsys.readouterr().err


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel of one module."""
    described = "\n".join([f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in needs)])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", described + "\n\n")


def test_wheels_of_what_is_missing_or_too_old_are_unpacked(tmp_path, monkeypatch):
    """Also what an unpacked one needs exactly, which an image has in another version."""
    installed = {"old": "1.0", "core": "1.0", "fine": "2.5"}
    monkeypatch.setattr(gpu_session, "version_of", lambda name: installed.get(name, ""))
    monkeypatch.setattr(gpu_session, "requirements", lambda: ["old>=2", "fine>=2", "Not-Carried>=1"])
    wheel(tmp_path, "old", "2.0", "core==1.1", "later; extra == 'later'")
    wheel(tmp_path, "core", "1.1")
    wheel(tmp_path, "fine", "2.6")
    site = tmp_path / "site"
    lines = sorted(gpu_session.install(tmp_path, site))
    assert lines == [
        "Not-Carried>=1 is needed, no version is installed, and no wheel is carried",
        "core-1.1-py3-none-any.whl unpacked; 1.0 is installed",
        "old-2.0-py3-none-any.whl unpacked; 1.0 is installed",
    ]
    assert sorted(path.name for path in site.glob("*.py")) == ["core.py", "old.py"]
    assert gpu_session.install(tmp_path, site) == lines[:1]


REPOSITORY = Path(gpu.__file__).parents[2]

SMALL = (
    "--model.layers=1",
    "--model.embed=16",
    "--model.heads=2",
    "--model.sequence=16",
    "--train.global-batch-size=2",
)


@pytest.mark.exhaustive
def test_a_run_is_killed_and_resumed(tmp_path, monkeypatch):
    """In true commands, which take the programs of the first of them."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    options = [*SMALL, f"--data.path={REPOSITORY / 'LICENSE'}"]
    first, then = (dict(found) for found in gpu_runs.train(ignore, str(tmp_path), 8, options))
    assert first["steps"] == 8
    assert "killed" not in first["told"]
    assert then["largest_difference"] == 0
    assert 4 <= then["killed_after"] < 8


@pytest.mark.parametrize(("part", "given"), [("evaluate", {}), ("generate", {"tokens": 4}), ("profile", None)])
def test_commands_take_the_options_that_parts_give_them(part, given, tmp_path, monkeypatch, capsys):
    """They refuse the run that is not there, or the config, and no option."""
    said = []

    def command(where, name, command, *words, fails=False):
        said.append(outcome(importlib.import_module(f"jaxdist.{command}").main, list(words)))
        return "{}"

    monkeypatch.setattr(gpu_runs, "_command", command)
    given = {"config": "no-such", "options": []} if given is None else given
    last(gpu_runs.PARTS[part](ignore, str(tmp_path), **given))
    assert said == [2]
    assert "unknown option" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_of_the_session_on_a_cpu(tmp_path):
    """The script, the bench and a part, in true processes: the bench is killed in its part, and is begun again."""
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(TINY.replace("layers = 3", "layers = 1"))
    script = REPOSITORY / "scripts" / "gpu_session.sh"
    state, out = tmp_path / "state", tmp_path / "out"
    argv = [script, "--state", state, "--out", out, "--wheels", tmp_path, "--models", tiny, "--rows", "2"]
    argv += ["--parts", "models", "--repeats", "1", "--warmup", "1"]
    environment = gpu.os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}

    def call(*words: str) -> subprocess.CompletedProcess:
        words = [*argv, *words]
        return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    first = call("--wait=0.1")
    assert first.returncode == 3, first
    assert "the same command waits for more of it" in first.stdout
    deadline = time.monotonic() + 60
    while not (state / "gpu.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    gpu.os.kill(int((state / "pid").read_text()), 9)
    rest = call("--wait=590")
    (part,) = json.loads((out / "gpu.json").read_text())["parts"]
    assert (part["state"], part["attempts"]) == ("done", 2), rest.stdout
    model = part["value"]
    assert model["tokens_per_second"] == pytest.approx(64 / model["step_seconds"])
    assert sum(model["kernels"]["seconds"].values()) > 0
    assert rest.returncode == 0
    assert (out / "gpu.md").read_text() in rest.stdout
    changed = call("--steps=3")
    assert changed.returncode == 2
    assert "holds a result with other --steps; ask for the same" in changed.stdout
