"""A trace of some steps: which they are, that it changes nothing, and what is read from it."""

import errno
import json
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from jaxdist.config import Config, RequestError
from jaxdist.programs.trace import (
    COLLECTIVE,
    COMPUTE,
    COPY,
    Kernel,
    Program,
    covered,
    kernels,
    read,
    summarize,
    table,
)
from jaxdist.request import load
from jaxdist.training import profile
from jaxdist.training.resume_check import differing
from jaxdist.training.run_dir import RunFolder
from tests.training.curves import FIGURES, lines, parameters

TEXT = """HloModule jit_train, is_scheduled=true, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%scatter (x: f32[8]) -> f32[4] {
  %x = f32[8]{0} parameter(0)
  ROOT %inner = f32[4]{0} reduce-scatter(%x), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}

%body (y: f32[8]) -> f32[8] {
  %y = f32[8]{0} parameter(0)
  ROOT %psum.7 = f32[8]{0} all-reduce(%y), replica_groups={{0,1}}, to_apply=%add
}

%condition (z: f32[8]) -> pred[] {
  %z = f32[8]{0} parameter(0)
  ROOT %no = pred[] constant(false)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %sliced_fusion = f32[4]{0} fusion(%p), kind=kCustom, calls=%scatter
  %wrapped-start = ((f32[8]{0}), f32[4]{0}) async-start(%p), calls=%scatter
  %wrapped-done = f32[4]{0} async-done(%wrapped-start)
  %all-gather-start.2 = (f32[4]{0}, f32[8]{0}) all-gather-start(%wrapped-done), dimensions={0}
  %all-gather-done.2 = f32[8]{0} all-gather-done(%all-gather-start.2)
  %reduce.3 = f32[] reduce(%p, %p), dimensions={0}, to_apply=%add
  ROOT %while.1 = f32[8]{0} while(%p), condition=%condition, body=%body
}
"""
PROGRAM = Program.of(TEXT)


def named(pid: int, name: str, thread: int | None = None) -> dict:
    what = "process_name" if thread is None else "thread_name"
    return {"ph": "M", "pid": pid, "name": what, "args": {"name": name}} | ({} if thread is None else {"tid": thread})


def ran(pid: int, thread: int, name: str, start: float, time: float, **told: str) -> dict:
    return {"ph": "X", "pid": pid, "tid": thread, "name": name, "ts": start, "dur": time, "args": told}


GPUS = [
    named(1, "/device:GPU:0"),
    named(1, "Stream #13(Compute,MemcpyD2D)", 13),
    named(1, "Stream #20(Compute)", 20),
    named(1, "XLA Ops", 99),
    named(2, "/device:GPU:1"),
    named(2, "Stream #13(Compute)", 13),
    named(7, "/host:CPU"),
    named(7, "python", 1),
    ran(1, 13, "gemm", 0, 100, hlo_module="jit_train", hlo_op="dot.1"),
    ran(1, 20, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 60, 100),  # 40 of it beside gemm
    ran(1, 13, "gemm", 140, 10, hlo_module="jit_train(3)", hlo_op="dot.1"),  # 10 more
    ran(1, 13, "MemcpyD2D", 150, 30),  # hides nothing
    ran(1, 99, "all-reduce.1", 60, 100, hlo_module="jit_train", hlo_op="all-reduce.1"),
    ran(1, 13, "gemm", 500, 1000, hlo_module="jit_evaluate", hlo_op="dot.1"),
    ran(2, 13, "gemm", 0, 60),
    ran(2, 13, "all_gather_kernel", 60, 20, hlo_op="all-gather-start.2"),  # one-shot kernels of XLA's own
    ran(7, 1, "all-reduce.1", 0, 900, hlo_op="all-reduce.1", device_ordinal="0"),
    {},
]


def test_what_an_instruction_is_follows_from_the_program_and_not_from_its_name():
    assert PROGRAM.module == "jit_train"
    kinds = PROGRAM.operations
    assert kinds["psum.7"] == "all-reduce"
    assert kinds["sliced_fusion"] == kinds["wrapped-start"] == kinds["inner"] == "reduce-scatter"
    assert kinds["all-gather-start.2"] == "all-gather"
    assert kinds["reduce.3"] == "reduce"
    assert kinds["while.1"] == "while"


def test_covered_time_counts_once():
    at = lambda *spans: [Kernel("0", "k", COMPUTE, *span) for span in spans]
    assert covered([]) == 0
    assert covered(at((5, 9), (0, 2))) == 6
    assert covered(at((0, 10), (2, 3), (4, 12), (20, 21), (20, 21))) == 13


def test_what_two_streams_hide_of_a_collective():
    found = summarize(kernels(GPUS, PROGRAM))
    assert found.devices == 2
    # GPU 0 is busy for 180, its collective runs for 100, of which 50 beside nothing; GPU 1: 80, 20, 20
    assert found.collectives == pytest.approx((100 / 180 + 20 / 80) / 2)
    assert found.exposed == pytest.approx((50 / 100 + 20 / 20) / 2)
    gemm, nccl, copy, gather = found.longest
    assert gemm == ("gemm", 1.5, 0.085, 170 / 260)
    assert nccl[:3] == ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 0.5, 0.05)
    assert copy[:3] == ("MemcpyD2D", 0.5, 0.015)
    assert gather[:3] == ("all_gather_kernel (all-gather)", 0.5, 0.01)
    uses = {one.name: one.use for one in kernels(GPUS, PROGRAM)}
    assert list(uses.values()) == [COMPUTE, COLLECTIVE, COPY, COLLECTIVE]


def test_on_a_cpu_loops_are_not_counted_beside_what_runs_in_them():
    events = [
        named(7, "/host:CPU"),
        ran(7, 1, "while.1", 0, 50, hlo_module="jit_train", hlo_op="while.1", device_ordinal="0"),
        ran(7, 1, "psum.7", 10, 30, hlo_module="jit_train", hlo_op="psum.7", device_ordinal="0"),
        ran(7, 1, "Rendezvous", 10, 30),
        ran(7, 2, "wait for completion", 0, 99, hlo_module="jit_train", device_ordinal="0"),
    ]
    assert list(kernels(events, PROGRAM)) == [Kernel("0", "psum.7 (all-reduce)", COLLECTIVE, 10, 40)]


def test_the_table():
    some = [Kernel("0", f"k{n}", COMPUTE, 1000 * n * n, 1000 * n * (n + 1)) for n in range(12)]
    told = table(summarize(some))
    assert [line.split()[-1] for line in told[1:-1]] == [f"k{n}" for n in range(11, 1, -1)]
    assert told[1].split() == ["11.00", "ms", "16.7%", "1", "k11"]
    assert told[-1] == "no collectives"
    told = table(summarize([*some, Kernel("0", "nccl" * 30, COLLECTIVE, 0, 500)]))
    assert told[-1] == "collectives in 0.8% of the busy time, 100.0% of it exposed: no computation overlaps it"
    assert max(map(len, told)) < 110
    with pytest.raises(ValueError, match="no kernels"):
        summarize([])


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ("x", "profile.steps is 'x': must be a step, counted from 1, or a range of steps, such as 10-12"),
        ("0-3", "profile.steps is '0-3': must be a step, counted from 1"),
        ("3-", "profile.steps is '3-': must be"),
        ("1-2-3", "profile.steps is '1-2-3': must be"),
        ("12-10", "profile.steps 12-10 ends before it begins; write 10-12"),
        ("19-21", "profile.steps 19-21 goes beyond train.steps 20; profile earlier steps, or train longer"),
        ("21", "profile.steps 21 goes beyond train.steps 20"),
    ],
)
def test_wrong_steps_are_told(steps, told):
    with pytest.raises(RequestError) as caught:
        load(None, {"profile.steps": steps, "train.steps": "20"})
    (problem,) = caught.value.problems
    assert problem.startswith(told)


def test_steps_as_numbers():
    assert not Config().profile.numbers
    asked = lambda steps, **more: load(None, {"profile.steps": steps, **more})
    assert list(asked("10-12").profile.numbers) == [10, 11, 12]
    assert list(asked("7", **{"train.epochs": "0.1"}).profile.numbers) == [7]
    assert differing(Config(), asked("10-12")) == []


@pytest.mark.parametrize(("first", "took"), [(0, [2, 3]), (2, [3]), (3, [])])
def test_a_run_that_goes_on_traces_what_is_left(first, took, tmp_path, monkeypatch):
    calls, said = [], []
    monkeypatch.setattr(profile.jax.profiler, "start_trace", lambda *_, **__: calls.append("start"))
    monkeypatch.setattr(profile.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    monkeypatch.setattr(profile.Profile, "_report", lambda self: None)
    config = Config(profile=dict(steps="2-3"))
    log = SimpleNamespace(say=said.append)
    meter = SimpleNamespace(log=log, paused=nullcontext, steps=4, device=SimpleNamespace(device_kind="cpu"))
    job = SimpleNamespace(note=lambda doing: None)
    with profile.Profile(config.profile, RunFolder(tmp_path), None, meter, job, first) as traced:
        for step in range(first + 1, 5):
            traced.before(step, ())
            calls.append(step)
            traced.after(step, ())
    outside = [step for step in range(first + 1, 5) if step not in took]
    before = [step for step in outside if step < 2]
    assert calls == [*before, *(["start", *took, "stop"] if took else []), *(step for step in outside if step > 3)]
    assert said == ([] if took else ["profile     none: the run takes the steps 4 to 4, not 2-3"])


@pytest.mark.slow
def test_a_traced_run_learns_the_same_and_shows_its_all_reduces(run, capsys):
    small = ("--mesh=2x1x1", "--train.steps=4", "--checkpoint.every=4", "--validation.every=4", "--model.layers=1")
    plain = run("plain", *small)
    assert not (plain / "profile").exists()
    capsys.readouterr()
    traced = run("traced", *small, "--profile.steps=2-3", "--log.every=4")
    figures = lambda folder: [{name: line[name] for name in FIGURES if name in line} for line in lines(folder)[-2:]]
    assert figures(traced) == figures(plain)
    assert np.array_equal(parameters(traced, 4), parameters(plain, 4))
    told = capsys.readouterr().err
    assert "profile     2 steps up to 3, 2 x cpu; of one device on average:" in told
    assert "  all-reduce" in told
    (path,) = traced.glob("profile/2-3/process-0/plugins/profile/*/perfetto_trace.json.gz")
    assert str(path) in told
    events = read(path)
    json.dumps(events, allow_nan=False)
    assert all({"ph", "pid", "ts", "dur"} <= set(one) for one in events if one and one["ph"] == "X")
    # Between lines of the log the host calls the step, and reads nothing of it; the trace ends with a read.
    called = [(one["name"], one["ts"]) for one in events if one and one.get("name", "").startswith("PjitFunction(")]
    assert {name for name, _ in called} == {"PjitFunction(jit(train))"}
    reads = [one["ts"] for one in events if one and one.get("name") == "np.asarray(jax.Array)"]
    assert 0 < max(at for _, at in called) < min(reads)
    told_of = [one["args"] for one in events if one.get("args", {}).get("hlo_module") == "jit_train"]
    calls = Counter((one["device_ordinal"], one["hlo_op"]) for one in told_of if "all-reduce" in one["hlo_op"])
    assert set(calls.values()) == {2}  # each in two steps, no more
    assert {device for device, _ in calls} == {"0", "1"}


def test_a_trace_that_tells_nothing_says_so(tmp_path, monkeypatch):
    said = []
    cut = SimpleNamespace(steps=range(2, 4), kind="NVIDIA H100", trace=tmp_path, say=said.append)
    cut.program = lambda: SimpleNamespace(as_text=lambda: TEXT)
    monkeypatch.setattr(profile, "MOST", 1)
    monkeypatch.setattr(profile, "read", lambda path: [{}])
    profile.Profile._report(cut)
    assert said == [
        "profile     no table of kernels: the trace holds no kernels of the devices",
        "            the trace lacks its end, for it holds a million events at most; profile fewer steps",
        f"            for Perfetto (ui.perfetto.dev): {tmp_path}",
    ]


def test_a_run_that_is_stopped_ends_its_trace(run, capsys, monkeypatch):
    def stop(self, step, state):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(profile.Profile, "after", stop)
    folder = run("stopped", "--mesh=2x1x1", "--train.steps=4", "--model.layers=1", "--profile.steps=1-3", code=1)
    (path,) = folder.glob("profile/1-3/process-0/plugins/profile/*/perfetto_trace.json.gz")
    assert f"profile     cut short with the run, and not read; what there is of it: {path}" in capsys.readouterr().err


def test_a_program_without_a_name_cannot_be_read():
    with pytest.raises(ValueError, match="the program has no name: 'ENTRY %main"):
        Program.of("ENTRY %main {\n  ROOT %a = f32[] parameter(0)\n}\n")
