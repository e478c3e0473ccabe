"""The sites of a job: how a process learns its own, how a mesh lies over them, and what a run says of it."""

import re
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist import launch
from jaxdist import train as command
from jaxdist.cluster import rendezvous, runtime
from jaxdist.cluster.process_env import find
from jaxdist.cluster.rendezvous import Member, check_sites
from jaxdist.config import ClusterConfig, Config, RequestError
from jaxdist.mesh import PIPELINE, REPLICA, make_mesh, parse_mesh
from jaxdist.training.run import lower_step
from tests.faults import jobs
from tests.faults.jobs import ends, told
from tests.processes import started
from tests.training.curves import alike

MEET = {"coordinator": "127.0.0.1:1234", "processes": 2, "process_id": 0}


def place(address: str, pattern: str) -> dict[str, str]:
    return {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}


def test_the_site_is_named_or_read_from_slurm():
    """As on a cluster with cells: below the switch that joins all. Node names may have dots."""
    assert find(ClusterConfig(**MEET), {}).site == ""
    assert find(ClusterConfig(**MEET, site="zurich"), place("a.b.n0", "switch.switch.node")).site == "zurich"
    by_slurm = ClusterConfig(**MEET, site="slurm")
    cell = place("root_switch.CELL1.leaf7.n386", "switch.switch.switch.node")
    assert find(by_slurm, cell).site == "CELL1"
    assert find(by_slurm, place("root.west.n0.example.org", "switch.switch.node")).site == "west"
    assert find(ClusterConfig(site="zurich", processes=1), {}).alone


@pytest.mark.parametrize(
    ("variables", "count"), [(place("n0", "node"), 0), (place("leaf.n0", "switch.node"), 1), ({}, 0)]
)
def test_a_topology_without_sites_is_refused(variables, count):
    with pytest.raises(RequestError, match=rf"site is slurm, but Slurm's topology has {count} switch(es)? above"):
        find(ClusterConfig(**MEET, site="slurm"), variables)


def member(process: int, host: str, site: str) -> Member:
    return Member(process, host, "", 2, site)


def test_all_processes_name_their_site_or_none():
    check_sites([member(0, "n0", ""), member(1, "n1", "")])
    check_sites([member(0, "n0", "a"), member(1, "n1", "b")])
    sentence = "process 0 is in site a, but process 1, 2 names none; give all processes --cluster.site, or none"
    with pytest.raises(RequestError, match=re.escape(sentence)):
        check_sites([member(0, "n0", "a"), member(1, "n1", ""), member(2, "n2", "")])


@pytest.fixture
def in_sites(monkeypatch):
    """Makes the 8 devices here belong to 4 processes of 2, in these sites."""

    def make(*sites: str) -> None:
        posted = [vars(member(process, f"n{process}", site)) for process, site in enumerate(sites)]
        monkeypatch.setattr(rendezvous, "_members", [])
        monkeypatch.setattr(rendezvous, "_own_address", lambda coordinator: "")
        monkeypatch.setattr(rendezvous.kv_store, "gather", lambda *arguments: posted)
        monkeypatch.setattr(runtime, "members", lambda: rendezvous._introduced("", 2))
        device = lambda number: SimpleNamespace(process_index=number // 2, id=number, platform="gpu", device_kind="GPU")
        devices = [device(number) for number in range(8)]
        monkeypatch.setattr(runtime.kv_store, "processes", lambda: 4)
        monkeypatch.setattr(runtime, "_devices", lambda: devices)
        monkeypatch.setattr(
            runtime, "make_mesh", lambda *arguments, **options: grid(make_mesh, monkeypatch, *arguments, **options)
        )

    return make


def grid(make, monkeypatch, *arguments, **options):
    """A mesh of devices that are none: what `jax.sharding.Mesh` would be given."""
    with monkeypatch.context() as patch:
        patch.setattr(jax.sharding, "Mesh", lambda devices, *names, **more: SimpleNamespace(devices=devices))
        return make(*arguments, **options)


def test_replica_lies_outside_of_all_other_axes_over_sites(in_sites):
    """Processes that were dealt out to two sites in turn; without sites, stages lie outside."""
    shape = parse_mesh("replica=2,pipeline=2,data=2")
    in_sites("a", "b", "a", "b")
    mesh = runtime.start(shape)
    # Device i is of process i // 2: site a has 0, 1, 4 and 5.
    by_axes = np.vectorize(lambda device: device.id)(mesh.devices).reshape(2, 2, 2)
    stages_replicas_data = [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert by_axes.tolist() == stages_replicas_data
    assert runtime.site_numbers(mesh).reshape(2, 2, 2).tolist() == [[[0, 0], [1, 1]]] * 2
    in_sites("", "", "", "")
    mesh = runtime.start(shape)
    assert np.vectorize(lambda device: device.id)(mesh.devices).ravel().tolist() == list(range(8))
    assert not runtime.site_numbers(mesh).any()
    # Site by site, whatever the order of the processes.
    in_sites("b", "b", "a", "b")
    mesh = runtime.start(parse_mesh("8x1x1"))
    assert [device.id for device in mesh.devices.flat] == [0, 1, 2, 3, 6, 7, 4, 5]


def test_the_axes_of_a_mesh_are_in_the_same_order_over_sites():
    """Only the devices are dealt out differently."""
    one, two = (make_mesh(parse_mesh("replica=2,pipeline=2"), jax.devices()[:4], sites) for sites in (1, 2))
    assert (one.axis_names, one.shape) == (two.axis_names, two.shape)
    assert one.axis_names.index(PIPELINE) < one.axis_names.index(REPLICA)
    assert [device.id for device in one.devices.flat] == [0, 1, 2, 3]
    assert [device.id for device in two.devices.flat] == [0, 2, 1, 3]


@pytest.mark.slow
def test_programs_do_not_know_of_sites():
    """The step is the same text."""
    model = dict(layers=2, embed=16, heads=2, vocab=64, sequence=16)
    config = Config(mesh="replica=2,pipeline=2", precision="float32", model=model)
    texts = [lower_step(config, jax.devices()[:4], sites).as_text() for sites in (1, 2)]
    assert texts[0] == texts[1]


def in_site(commands: list[list[str]], sites: str) -> list[list[str]]:
    return [[*words, f"--cluster.site={site}"] for words, site in zip(commands, sites, strict=True)]


@pytest.mark.slow
def test_a_run_over_sites_has_the_checkpoints_of_one_without(text, tmp_path):
    """The same mesh: each site has one replica and both stages, where one host would have a stage of both replicas."""
    words = lambda name: jobs.argv(
        tmp_path / name, text, "--mesh=replica=2,pipeline=2", "--model.layers=2", "--pipeline.microbatches=2",
        "--train.global-batch-size=8",
    )  # fmt: skip
    with started(in_site(jobs.train(words("two"), 2), "ab")) as running:
        assert ends(running, 300) == [0, 0], told(running)
        said = running[0].said()
    assert "with 2 devices, in site a" in said
    assert "with 2 devices, in site b" in said
    assert "warning" not in said
    assert re.search(r"sites +2; a device sends .* over replica in a step: .* s over the link of two-sites-1g, ", said)
    assert command.main(words("one")) == 0
    alike(tmp_path / "two", tmp_path / "one", 20)


@pytest.mark.slow
def test_a_run_warns_of_another_axis_that_spans_its_sites(text, tmp_path):
    words = jobs.argv(tmp_path / "run", text, "--mesh=2x1x1", "--train.steps=2")
    with started(in_site(jobs.train(words, 2), "ab")) as running:
        assert ends(running, 300) == [0, 0], told(running)
        said = running[0].said()
    (sentence,) = [line for line in said.splitlines() if line.startswith("warning")]
    assert re.search(
        r"data=2 spans 2 sites: its collectives take \S+ s of a step over the link of two-sites-1g", sentence
    )


@pytest.mark.slow
def test_a_run_whose_processes_disagree_about_sites_is_refused(text, tmp_path):
    first, second = jobs.train(jobs.argv(tmp_path / "run", text, "--mesh=2x1x1"), 2)
    with started([[*first, "--cluster.site=a"], second]) as running:
        assert ends(running, 120) == [2, 2], told(running)
        assert "process 0 is in site a, but process 1 names none" in running[0].said() + running[1].said()


def test_each_task_of_a_slurm_step_finds_its_site(cluster):
    """In Slurm's topology: half of the nodes are below one switch."""
    program = "from jaxdist.cluster.process_env import *; print(find(ClusterConfig(site='slurm')).site)"
    said = cluster.run("srun", "-N4", "--ntasks-per-node=1", "--label", sys.executable, "-c", program)
    assert dict(line.split(": ") for line in said.splitlines()) == {"0": "west", "1": "west", "2": "east", "3": "east"}


def test_a_slurm_job_passes_on_that_slurm_knows_the_sites(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = ["slurm", "--time=9", f"--run-dir={tmp_path / 'run'}", "--nodes=2"]
    assert launch.main([*asked, "--cluster.site=slurm"]) == 0
    assert "--cluster.site=slurm" in capsys.readouterr().out
    with pytest.raises(RequestError, match="site west would put all tasks of the job into one site; write slurm"):
        launch.main([*asked, "--cluster.site=west"])


def test_the_automatic_mesh_needs_to_know_the_link():
    from jaxdist.planning.search.automatic import Found, cluster_of

    found = Found("NVIDIA H100 80GB HBM3", "gpu", 16, 8, 0, sites=2)
    with pytest.raises(RequestError, match="--mesh auto does not know the link between the 2 sites of this job"):
        cluster_of(found)
    assert cluster_of(Found("NVIDIA H100 80GB HBM3", "gpu", 16, 8, 0)).per_host == 8
