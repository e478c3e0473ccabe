"""Compiling for devices that are not there, in another process. What needs JAX's CUDA plug-in is skipped without it."""

import logging
import os
import re
import subprocess
import sys
from functools import partial

import pytest

from jaxdist.cluster import gpus, runtime
from jaxdist.config import RequestError
from jaxdist.planning.clusters import of_gpu
from jaxdist.planning.hardware import CARDS, GPUS, peak_flops
from jaxdist.programs import compile_worker, target
from jaxdist.programs.cross_compile import compile_apart
from tests.planning import lowering
from tests.tiers import exhaustive, thinned

needs_plugin = pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")


def refused(function, *arguments) -> str:
    with pytest.raises(RequestError) as error:
        function(*arguments)
    return str(error.value)


@pytest.mark.parametrize("name", GPUS)
def test_each_gpu_is_known_by_its_kind(name):
    gpu = GPUS[name]
    assert peak_flops(gpu.kind, "bfloat16") == gpu.peak
    assert f"device_memory_size: {gpu.memory}\n" in target.text(gpu)
    assert f'device_description_str: "{gpu.kind}"' in target.text(gpu)


def test_a_sister_is_not_taken_for_it():
    """GB200 has b200 in its name, and more FLOP/s."""
    assert (peak_flops("NVIDIA GB200", "bfloat16"), peak_flops("NVIDIA B200", "bfloat16")) == (2500e12, 2250e12)
    assert (peak_flops("NVIDIA GB300", "bfloat16"), peak_flops("NVIDIA B300", "bfloat16")) == (2500e12, 2250e12)
    assert (peak_flops("NVIDIA A100-SXM4-40GB", "bfloat16"), GPUS["a100-40"].memory < 2**36) == (312e12, True)
    assert (peak_flops("NVIDIA L40S", "bfloat16"), peak_flops("NVIDIA L4", "bfloat16")) == (362e12, 121e12)
    assert {peak_flops(f"NVIDIA {name}", "bfloat16") for name in ("L40", "A10", "GeForce RTX 4090 D")} == {None}


def test_cards_have_16_to_48_gb_and_the_float32_flops_of_their_data_sheets():
    sheets = {"a6000": (48, 38.7), "l4": (24, 30.3), "l40s": (48, 91.6), "rtx4090": (24, 82.6), "rtx5090": (32, 104.8)}
    sheets["t4"] = (16, 8.1)
    assert set(CARDS) == set(sheets)
    for name, (gigabytes, teraflops) in sheets.items():
        gpu = GPUS[name]
        assert 0.9 * gigabytes * 2**30 < gpu.memory < gigabytes * 2**30
        assert round(gpu.peak_f32 / 1e12, 1) == teraflops
        threads = 1024 if name == "t4" else 1536
        assert f"threads_per_core_limit: {threads}\n" in target.text(gpu)
    # Of three, no links are known: as many as are asked for are taken to be in one host.
    assert [name for name in CARDS if of_gpu(name) is None] == ["a6000", "l4", "t4"]
    assert (target.hosts("l4", 12), target.hosts("rtx4090", 16), target.hosts("rtx5090", 2)) == (
        (1, 12),
        (2, 8),
        (1, 2),
    )


def test_gibibytes_and_gigabytes_are_not_confused():
    """CUDA reports 79.1 GiB of an H100's 80."""
    assert [round(GPUS[name].memory / 2**30, 1) for name in ("a100", "h100", "h200", "gh200", "b200")] == [
        79.3,
        79.1,
        139.8,
        94.5,
        178.4,
    ]


def test_names_and_counts():
    assert target.hosts("h100", 512) == (64, 8)
    assert target.hosts("gh200", 512) == (128, 4)
    assert target.hosts("h100", 4) == (1, 4)
    # What does not fill hosts lies in equal parts of them.
    assert [target.hosts("h100", count) for count in (12, 9, 20)] == [(3, 4), (9, 1), (5, 4)]
    assert refused(target.hosts, "h10", 8) == "target 'h10' is not known; did you mean 'h100'?"
    assert "ask for 1 or more" in refused(target.hosts, "h100", 0)


def test_without_the_plugin(monkeypatch):
    """Told before any process is started."""
    monkeypatch.setattr(target, "PLUGINS", ("no_such_plugin",))
    monkeypatch.setattr(subprocess, "run", None)
    assert refused(compile_apart, lowering.product, "h100", 8) == (
        "compiling for h100 needs JAX's CUDA plug-in, though no GPU; run pip install 'jaxdist[target]'"
    )


def test_too_large(monkeypatch):
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert target.too_large(100 * 2**30, "h100", ["model.remat to block"]) == (
        "the step needs 100.0 GiB on each h100, of whose 79.1 GiB JAX takes 72.8 GiB (XLA_CLIENT_MEM_FRACTION 0.92); "
        "set model.remat to block"
    )
    assert target.too_large(100 * 2**30, "h100", []).endswith(
        "; no other setting is predicted to fit; choose a smaller model, or a GPU with more memory"
    )


def test_what_fits_with_a_larger_share(monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    fits = lambda gib: not target.too_large(int(gib * 2**30), "h100", [])
    assert fits(72)
    assert not fits(73)
    assert target.too_large(74 * 2**30, "h100", []).endswith("; set XLA_CLIENT_MEM_FRACTION to 0.94")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.94")
    assert fits(74)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # then jaxdist leaves it to JAX, which takes 0.75
    assert fits(59)
    assert not fits(60)


@pytest.mark.slow
@pytest.mark.usefixtures("own_process")
def test_a_program_of_more_cpu_devices_than_here(monkeypatch, capfd):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_cpu_enable_fast_math=false")
    program = compile_apart(lowering.product, None, 12)
    assert re.search(r"num_partitions=12\b", program.text)
    assert "all-reduce" in program.text
    assert program.argument_bytes == 4 * (16 * 256 + 256 * 128)
    assert program.output_bytes == 4 * 128
    assert program.peak_bytes == program.argument_bytes + program.output_bytes + program.temporary_bytes
    assert program.lower_seconds > 0
    assert program.compile_seconds > 0
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_this_process_keeps_its_backend():
    """In a fresh one: neither is a backend made, nor does `lower` need to be imported with jax's platform set."""
    code = (
        "from tests.planning import lowering; from jaxdist.programs.cross_compile import compile_apart;"
        "compile_apart(lowering.product, None, 3); from jax._src import xla_bridge;"
        "assert not xla_bridge.backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_errors_come_back_as_they_are():
    with pytest.raises(RequestError) as request:
        compile_apart(lowering.mistakes, None, 1)
    assert request.value.problems == ["the first", "the second"]
    with pytest.raises(ValueError) as value:
        compile_apart(lowering.cpu_count, None, 3)
    assert str(value.value) == "3 x cpu"
    with pytest.raises(RuntimeError) as other:
        compile_apart(lowering.bug, None, 1)
    assert str(other.value) == "KeyError: 'key'"
    assert "lowering.py" in other.value.__notes__[0]
    assert "1024 devices at most, not 1025" in refused(compile_apart, lowering.product, None, 1025)


@pytest.mark.parametrize("how", ["own_process", "compile_workers"])
def test_a_process_that_dies(how, request):
    request.getfixturevalue(how)
    with pytest.raises(RuntimeError, match=r"for 2 x CPU device was killed by SIGKILL, as happens .*: last words$"):
        compile_apart(lowering.crash, None, 2)


def test_a_function_of_the_script_is_refused(monkeypatch):
    monkeypatch.setattr(lowering.product, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "product", lowering.product, raising=False)
    with pytest.raises(ValueError, match="belongs to the script that runs"):
        compile_apart(lowering.product, None, 1)


@pytest.mark.parametrize(
    ("jaxlib", "flags", "wanted"),
    [
        ("0.12.0.1", "", {target.EMITTERS: False}),
        ("0.12.0.1", f"--{target.EMITTERS}=true", {}),
        ("0.10.2", "", {}),
    ],
)
def test_fusions_are_not_compiled_to_be_measured(jaxlib, flags, wanted, monkeypatch):
    monkeypatch.setattr(target, "version", {"jaxlib": jaxlib}.get)
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert target.options() == wanted


def test_the_options_reach_the_compiler_where_the_devices_are_gpus(monkeypatch):
    class Lowered:
        def compile(self, compiler_options=None):
            raise ValueError(f"with {compiler_options}")

    monkeypatch.setattr(target, "options", lambda: {"an option": True})
    monkeypatch.setattr(target, "devices", lambda name, count: [])
    monkeypatch.setattr(compile_worker, "_cpus", lambda count: [])
    for name, told in (("h100", "with {'an option': True}"), (None, "with None")):
        with pytest.raises(ValueError, match=told):
            compile_worker.compiled(lambda devices: Lowered(), name, 8)


OFTEN = ("a100", "gh200", "h100", "h200", "b200")
"""A GPU of each module; the others differ from one of these in sizes alone, or are cards."""


@needs_plugin
@pytest.mark.parametrize(
    "name",
    [
        *thinned(zip(OFTEN), len(OFTEN), first=1),
        *exhaustive(zip([name for name in GPUS if name not in OFTEN])),
    ],
)
def test_a_program_for_each_gpu(name, capfd):
    count = 512 if name == "h100" else 16
    program = compile_apart(lowering.product, name, count)
    assert re.search(rf"num_partitions={count}\b", program.text)
    assert "all-reduce" in program.text
    assert "collective_backend_config" in program.text  # the CPU's programs have none
    assert program.argument_bytes == 4 * (16 * 256 + 256 * 128)
    assert capfd.readouterr() == ("", "")


@needs_plugin
def test_attention_is_that_of_a_gpu_with_cudnn():
    """No library of cuDNN's has to be here."""
    text = compile_apart(lowering.attention, "h100", 8).text
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == 1
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1


@needs_plugin
@pytest.mark.slow
def test_attention_of_a_gpu_has_the_window():
    text = compile_apart(partial(lowering.attention, window=100), "h100", 8).text
    assert len(re.findall(r'"sliding_window_length": ?100\b', text)) == 2


@needs_plugin
def test_without_a_gpu_the_plugin_is_quiet(tmp_path):
    """A laptop with `jaxdist[target]`: the plug-in fails to find CUDA, with a traceback that nobody needs."""
    command = [sys.executable, "-m", "jaxdist.train", "--dry-run", "--mesh", "2x1x1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert "ERROR" not in done.stderr


@needs_plugin
@pytest.mark.exhaustive
@pytest.mark.skipif(gpus.driver(), reason="there is an NVIDIA GPU here")
def test_the_first_command_begins_with_its_own_line(tmp_path):
    """Of the README, in an environment with the plug-in and no GPU: JAX logs that as an error, with a traceback."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    options = [
        "--train.steps=1",
        "--model.layers=1",
        "--validation.batches=1",
        "--model.vocab=300",
        "--model.sequence=16",
    ]
    text = tmp_path / "text.txt"
    text.write_text("some words to learn from; " * 400)
    command = [sys.executable, "-m", "jaxdist.train", *options, f"--data.path={text}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True, cwd=tmp_path)
    assert done.stderr.startswith("versions    jaxdist ")
    assert "ERROR" not in done.stderr


@pytest.mark.parametrize(
    ("platforms", "there", "wanted"),
    [("", False, False), ("", True, True), ("cpu", True, False), ("cuda", False, True), ("cuda,cpu", False, True)],
)
def test_where_it_matters_that_there_is_no_gpu(platforms, there, wanted, tmp_path):
    if there:
        (tmp_path / "nvidia0").touch()
    assert gpus.wanted(platforms, tmp_path) == wanted


def test_only_the_record_of_the_plug_in_is_dropped(monkeypatch, caplog):
    """A host with an NVIDIA device keeps it."""
    logger = logging.getLogger("jax._src.xla_bridge")

    def devices():
        logger.error("Jax plugin configuration error: Exception when calling jax_plugins.xla_cuda13.initialize()")
        logger.warning("something else")
        return ["device"]

    monkeypatch.setattr(runtime.jax, "devices", devices)
    monkeypatch.setattr(gpus, "wanted", lambda platforms: False)
    assert runtime._devices() == ["device"]
    assert [record.message for record in caplog.records] == ["something else"]
    monkeypatch.setattr(gpus, "wanted", lambda platforms: True)
    runtime._devices()
    assert len(caplog.records) == 3
