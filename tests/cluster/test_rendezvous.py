"""How the processes of a job are laid over hosts, and which of them a mesh that fills itself has use for."""

import json
import sys

import pytest

from jaxdist import train as command
from tests.faults import jobs
from tests.faults.jobs import ends, told
from tests.processes import started
from tests.training.curves import alike

LAID = """
import json, sys
from jaxdist.cluster.rendezvous import join
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster import runtime
from jaxdist.config import FaultConfig
from jaxdist.mesh import parse_mesh
process, meshes = int(sys.argv[1]), sys.argv[2:]
join(ProcessEnv(4, process, "n0:4710"), FaultConfig())
found = [runtime.start(parse_mesh(mesh)) for mesh in meshes]
for mesh in found:
    told = [[d.process_index for d in mesh.devices.flat], runtime.notes(mesh), runtime.host_lines(mesh)]
    print("told " + json.dumps(told), flush=True)
"""


@pytest.mark.slow
def test_neighbours_in_the_mesh_are_neighbours_in_a_host(network):
    """Processes that were dealt out to two hosts in turn, as Slurm does it with --distribution=cyclic; a proxy that the
    login shell has named, and that nobody can reach, is in nobody's way."""
    proxy = ("env", "http_proxy=http://10.77.0.99:3128", "https_proxy=http://10.77.0.99:3128")
    command = lambda i: network.on(f"n{i % 2}", *proxy, sys.executable, "-c", LAID, i, "2x2x1", "1x4x1", "1x1x4")
    with started([command(i) for i in range(4)]) as running:
        assert ends(running, 120) == [0] * 4, told(running)
        lines = [line for line in running[3].said().splitlines() if line.startswith("told ")]
    within, across, stages = (json.loads(line.removeprefix("told ")) for line in lines)
    assert [mesh[0] for mesh in (within, across, stages)] == [[0, 2, 1, 3]] * 3
    assert within[1] == stages[1] == []
    (note,) = across[1]
    assert note.startswith("model=4 spans hosts")
    assert "a host has 2 of these devices" in note
    assert within[2] == [
        "process 0, 2 on n0 (10.77.0.10) with 1, 1 device",
        "process 1, 3 on n1 (10.77.0.11) with 1, 1 device",
    ]


@pytest.mark.slow
def test_a_process_that_the_mesh_has_no_use_for_leaves(text, tmp_path):
    """A global batch of 8 divides by 2, not by 3."""
    with started(jobs.train(jobs.argv(tmp_path / "run", text, "--mesh=-1x1x1"), 3)) as running:
        assert ends(running, 240) == [0, 0, 0], told(running)
        said = "process 2] nothing to do: the mesh takes the devices of 2 of 3 processes; "
        assert said + "train.global_batch_size 6 or 9 would use all 3 devices" in running[2].said()
        assert "2 x cpu" in running[0].said()
    assert command.main(jobs.argv(tmp_path / "one", text, "--mesh=2x1x1")) == 0
    alike(tmp_path / "run", tmp_path / "one", 20)


@pytest.mark.exhaustive
def test_hosts_with_different_numbers_of_devices_train_as_one(text, tmp_path):
    """2 and 4."""
    words = lambda name: jobs.argv(
        tmp_path / name, text, "--mesh=6x1x1", "--train.global-batch-size=12", "--parallel.zero=2"
    )
    split = lambda count: ["env", f"XLA_FLAGS=--xla_force_host_platform_device_count={count}"]
    commands = jobs.train(words("two"), 2)
    with started([[*split(2), *commands[0]], [*split(4), *commands[1]]]) as running:
        assert ends(running, 240) == [0, 0], told(running)
        assert "process 0, 1 on" in running[0].said()
        assert "with 2, 4 devices" in running[0].said()
    assert command.main(words("one")) == 0
    alike(tmp_path / "two", tmp_path / "one", 20)
