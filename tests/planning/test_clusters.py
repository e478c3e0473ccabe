"""Clusters: the shipped ones say what the hardware table and their sources say; all that a file has wrong is told."""

import re
import tomllib
from dataclasses import replace
from itertools import pairwise

import pytest

from jaxdist.config import RequestError
from jaxdist.planning.clusters import PRESETS, Cluster, Link, cluster, of_gpu, of_kind, to_toml
from jaxdist.planning.hardware import GPUS
from jaxdist.process.gpu_memory import GPU_SHARE

OWN = Cluster(
    name="own",
    gpu="h100",
    per_host=4,
    memory=7e10,
    peak=989e12,
    matmul=0.7,
    bandwidth=3e12,
    inside=Link(3e11, 2e-6),
    across=Link(2.5e10, 0.0),
    overlap=1.25,
    sources=('measured "here"', "and ü"),
    watts=650.0,
)


def refused(name: str) -> list[str]:
    with pytest.raises(RequestError) as error:
        cluster(name)
    return error.value.problems


@pytest.fixture
def own(tmp_path):
    """Writes a file with some lines of OWN replaced, and tells what is wrong with it."""

    def told(*changes: tuple[str, str]) -> list[str]:
        text = to_toml(OWN, ["measured"])
        for pattern, line in changes:
            text, count = re.subn(pattern, line, text, count=1, flags=re.MULTILINE)
            assert count, pattern
        (tmp_path / "own.toml").write_text(text)
        return [problem.removeprefix(f"{tmp_path / 'own.toml'}: ") for problem in refused(str(tmp_path / "own.toml"))]

    return told


TWO_SITES = {"two-sites-1g": 1e9, "two-sites-10g": 1e10}
"""Bits per second of the line between the sites."""

DATA_SHEETS = {
    "a100": (300e9, 25e9),
    "gh200": (450e9, 25e9),
    "h100": (450e9, 50e9),
    "h200": (450e9, 50e9),
    "b200": (900e9, 50e9),
    "a100-40": (300e9, 25e9),
    "gb200": (900e9, 50e9),
    "b300": (900e9, 100e9),
    "h100-pcie": (63e9, 25e9),
    "l40s": (31.5e9, 6.25e9),
    "rtx4090": (31.5e9, 1.5625e9),
    "rtx5090": (63e9, 0.625e9),
}
"""Bytes per second one way of NVLink, or of a slot of PCIe, and of each GPU's share of the network cards."""

PER_HOST = {"gh200": 4, "gb200": 72, "rtx5090": 2}
"""Where it is not eight."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_shipped_cluster_is_that_of_its_gpu(name):
    """And within 60 % to 100 % of the data sheets' links, all its numbers with a source."""
    one = cluster(name)
    assert one.name == name
    assert one.sources
    gpu = GPUS.get(one.gpu)
    assert (gpu is None) == (name in ("cpu", "v100-nvlink", "mi300x"))
    if name in TWO_SITES:
        # One host of h100-ndr in each site.
        h100 = cluster("h100-ndr")
        assert set(h100.sources) < set(one.sources)
        same = {"name": "h100-ndr", "sources": h100.sources, "hosts_per_site": 0, "between": None}
        assert replace(one, **same) == h100
        assert (one.per_site, one.sites(8), one.sites(16)) == (8, 1, 2)
        # All that TCP carries over a line of 1 or 10 Gb/s: 1448 bytes of data in a frame of 1538.
        assert one.between.bandwidth == pytest.approx(TWO_SITES[name] / 8 * 1448 / 1538, rel=1e-3)
        assert one.between.latency == pytest.approx(1e6 * 1.468 / 299_792_458, rel=1e-3)
    elif gpu:
        assert of_gpu(one.gpu) == of_kind(gpu.kind) == one
    if gpu:
        assert (one.peak, one.bandwidth) == (gpu.peak, gpu.bandwidth)
        assert one.memory == pytest.approx(GPU_SHARE * gpu.memory)
        assert one.per_host == PER_HOST.get(one.gpu, 8)
        link, network = DATA_SHEETS[one.gpu]
        assert 0.6 * link <= one.inside.bandwidth <= link
        assert 0.6 * network <= one.across.bandwidth <= network
    lines = PRESETS[name].read_text().splitlines()
    for before, line in pairwise(lines):
        if re.match(r"(per_host|hosts_per_site|memory|peak|matmul|bandwidth|pair|overlap|latency) =", line):
            assert before.startswith(("#", "gpu =")), line


GUESSES = {"a100-40", "b300", "gb200-nvl72", "h100-pcie", "l40s", "mi300x", "rtx-4090", "rtx-5090"}
"""Those of which no step and hardly a link is measured."""


def test_the_clusters_of_the_facts_are_there():
    known = {"a100-hdr", "h100-ndr", "h200-ndr", "alps-gh200", "b200", "v100-nvlink", "cpu", *TWO_SITES}
    assert known | GUESSES == set(PRESETS)
    assert {name for name, path in PRESETS.items() if "Predictions" in path.read_text()} == GUESSES
    assert cluster("alps-gh200").across.bandwidth == 25e9  # four 200 Gb/s cards a node, one per module
    assert cluster("h100-ndr").matmul == pytest.approx(794.5 / 989, abs=1e-3)


def test_a_cluster_is_written_and_read_back(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(to_toml(OWN, ["measured", "", "on a Sunday"]))
    assert cluster(str(path)) == OWN
    assert path.read_text().startswith("# measured\n#\n# on a Sunday\n")
    assert tomllib.loads(path.read_text())["inside"] == {"bandwidth": 3e11, "latency": 2e-6}
    paired = replace(OWN, inside=Link(3e11, 2e-6, pair=1e11))
    path.write_text(to_toml(paired, []))
    assert cluster(str(path)) == paired


def test_a_cluster_of_sites_is_written_and_read_back(tmp_path):
    path = tmp_path / "own.toml"
    sites = replace(OWN, hosts_per_site=3, between=Link(1.25e8, 0.02))
    path.write_text(to_toml(sites, []))
    assert cluster(str(path)) == sites
    assert (sites.per_site, sites.sites(12), sites.sites(13), OWN.sites(10**6)) == (12, 1, 2, 1)


LINK = "[between]\nbandwidth = 1e8\nlatency = 0.01\n"

SITES = f"hosts_per_site = 2\n{LINK}[inside]\n"
"""What a file of sites has more, before its `[inside]`."""


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            ("hosts_per_site = 2\n", ""),
            "[between] is given, but hosts_per_site is missing; set it to the number of hosts of a site",
        ),
        (
            (LINK, ""),
            "hosts_per_site is given, but the link between sites is missing; "
            "write [between] with bandwidth and latency",
        ),
        (("= 2", "= 0"), "hosts_per_site is 0: must be at least 1"),
        (("= 2", "= 2.5"), "hosts_per_site is 2.5: must be a whole number"),
        (("bandwidth = 1e8\n", ""), "between.bandwidth is missing; set it, in bytes per second"),
        (("latency = 0.01", "latency = 20"), "between.latency is 20: must be at most 10, in seconds"),
        (("latency =", "pair = 1\nlatency ="), "unknown key 'between.pair'; valid names are bandwidth, latency"),
        (
            (LINK, "between = 1e8\n"),
            "between is 100000000.0: must be a table; write [between] with bandwidth and latency",
        ),
    ],
)  # fmt: skip
def test_each_mistake_about_sites_is_one_sentence(own, wrong, sentence):
    assert wrong[0] in SITES
    assert own((r"^\[inside\]\n", SITES.replace(*wrong))) == [sentence]


def test_a_file_takes_from_its_base_what_it_does_not_say(tmp_path):
    (tmp_path / "own.toml").write_text(to_toml(OWN, []))
    path = tmp_path / "slow.toml"
    path.write_text('base = "own.toml"\nper_host = 2\nsources = ["here"]\n[across]\nbandwidth = 1e9\n')
    slow = cluster(str(path))
    sources = ("here", *OWN.sources)
    assert slow == replace(OWN, name="slow", per_host=2, across=Link(1e9, OWN.across.latency), sources=sources)
    # A file of another folder, and a shipped cluster.
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "two.toml").write_text(f'base = "{path}"\nmatmul = 0.6\n')
    assert cluster(str(tmp_path / "deeper" / "two.toml")) == replace(slow, name="two", matmul=0.6)
    path.write_text('base = "h100-ndr"\nper_host = 4\n')
    assert cluster(str(path)) == replace(cluster("h100-ndr"), name="slow", per_host=4)


def test_the_numbers_of_a_gpu_are_not_those_of_another_one(tmp_path):
    """The base may have them for its GPU alone."""
    (tmp_path / "own.toml").write_text(to_toml(OWN, []))
    path = tmp_path / "other.toml"
    path.write_text('base = "own.toml"\ngpu = "b200"\n')
    other = cluster(str(path))
    b200 = GPUS["b200"]
    assert (other.memory, other.peak, other.bandwidth) == (GPU_SHARE * b200.memory, b200.peak, b200.bandwidth)
    assert (other.per_host, other.matmul, other.inside) == (OWN.per_host, OWN.matmul, OWN.inside)
    path.write_text('base = "own.toml"\ngpu = "mi100"\n')
    assert [problem.partition(";")[0] for problem in refused(str(path))] == [
        f"{path}: {key} is missing" for key in ("memory", "peak", "bandwidth")
    ]


def test_bases_that_are_not_there_and_circles(tmp_path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text('base = "h100-nrd"\n')
    assert refused(str(first)) == [
        f"{first}: base 'h100-nrd' is neither a cluster nor a file; did you mean 'h100-ndr'?"
    ]
    first.write_text("base = 8\n")
    assert refused(str(first)) == [f'{first}: base is 8: must be a name, such as "h100-ndr"']
    first.write_text('base = "b.toml"\n')
    second.write_text('base = "a.toml"\n')
    assert refused(str(first)) == [
        f"{second}: base 'a.toml' leads back to itself (a.toml -> b.toml -> a.toml); name another base in one of them"
    ]
    first.write_text('base = "a.toml"\n')
    assert "(a.toml -> a.toml)" in refused(str(first))[0]
    # What is wrong in the base is told of the file that was asked for.
    second.write_text(to_toml(OWN, []).replace("per_host = 4", "per_host = 0"))
    first.write_text('base = "b.toml"\npeek = 1\n')
    assert refused(str(first)) == [
        f"{first}: unknown key 'peek'; did you mean 'peak'?",
        f"{first}: per_host is 0: must be at least 1",
    ]


def test_names_that_are_no_cluster(tmp_path):
    assert refused("h100-nrd") == ["cluster 'h100-nrd' is neither a cluster nor a file; did you mean 'h100-ndr'?"]
    assert "valid names are a100-40, a100-hdr, alps-gh200" in refused("nothing")[0]
    assert "is a folder" in refused(str(tmp_path))[0]
    (tmp_path / "own.toml").write_text("gpu = h100")
    assert "is not valid TOML" in refused(str(tmp_path / "own.toml"))[0]


def test_everything_that_is_wrong_in_a_file_is_told_at_once(own):
    assert own(
        ("^peak.*", "peek = 9e14"),
        ("^memory.*", "memory = -1"),
        ("^per_host.*", "per_host = 4.5"),
        ("^matmul.*", "matmul = 80"),
        ("^overlap.*", "overlap = true"),
        ("^gpu.*", "gpu = 100"),
        ("^sources.*", 'sources = "here"'),
        ("^latency.*", "latency = 20"),
    ) == [
        "unknown key 'peek'; did you mean 'peak'?",
        "gpu is 100: must be the name of a GPU, in quotes",
        "per_host is 4.5: must be a whole number",
        "memory is -1: must be at least 1, in bytes",
        "peak is missing; set it, in FLOP/s",
        "matmul is 80: must be at most 1, in a share of the peak",
        "inside.latency is 20: must be at most 10, in seconds",
        "overlap is true: must be a number",
        "sources is 'here': must be a list of texts, such as [\"measured on our machine\"]",
    ]


def test_a_link_that_is_no_table_and_one_that_lacks_a_key(own):
    assert own((r"\[inside\]\nbandwidth.*\n", "[inside]\n"), (r"\[across\]\nband", "[[across]]\nband")) == [
        "inside.bandwidth is missing; set it, in bytes per second",
        "across is [{'bandwidth': 25000000000.0, 'latency': 0.0}]: must be a table; "
        "write [across] with bandwidth and latency",
    ]


def test_only_gpus_of_a_host_may_lack_a_switch(own):
    assert own((r"\[inside\]\n", "[inside]\npair = -1\n"), (r"\[across\]\n", "[across]\npair = 1e9\n")) == [
        "unknown key 'across.pair'; valid names are bandwidth, latency",
        "inside.pair is -1: must be at least 1, in bytes per second",
    ]


def test_what_is_known_of_a_gpu_may_be_left_out(own, tmp_path):
    gpu, separator, links = to_toml(OWN, []).partition("[inside]")
    kept = re.sub("^(memory|peak|bandwidth) = .*\n", "", gpu, flags=re.MULTILINE) + separator + links
    path = tmp_path / "short.toml"
    path.write_text(kept)
    found = cluster(str(path))
    assert (found.memory, found.peak, found.bandwidth) == (
        GPU_SHARE * GPUS["h100"].memory,
        GPUS["h100"].peak,
        GPUS["h100"].bandwidth,
    )
    path.write_text(kept.replace('"h100"', '"h1000"'))
    missing = [f"{path}: {key} is missing" for key in ("memory", "peak", "bandwidth")]
    assert [problem.partition(";")[0] for problem in refused(str(path))] == missing
