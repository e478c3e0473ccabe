"""`bench gpu`: what it asks its processes, and what it tells of their answers, which are made up."""

import json
import re
from types import SimpleNamespace

import pytest

from jaxdist.bench import __main__ as bench
from jaxdist.bench import gpu, gpu_child, gpu_order, gpu_process, gpu_runs, measuring
from jaxdist.bench.gpu_order import ALIKE
from jaxdist.bench.gpu_parts import ATTENTION, MATMUL, OTHER
from jaxdist.bench.gpu_process import Ended
from jaxdist.bench.measuring import ignore
from jaxdist.request import load, outcome


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


PLAYED = played({"traced": 0, "config": "llama_1b", "overrides": ALIKE}, {})

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
