"""The all-reduce algorithms: their sums, their messages, how they grow; the claims, their controls, the command."""

import json
from dataclasses import replace
from math import log2
from types import SimpleNamespace

import jax
import pytest

from jaxdist.config import RequestError
from jaxdist.lab import all_reduce
from jaxdist.lab.__main__ import main
from jaxdist.lab.claims import claims
from jaxdist.lab.reductions import checks
from jaxdist.lab.reductions.algorithms import ALGORITHMS, star
from jaxdist.lab.reductions.checks import CHECKS, SIZES, WHAT, orders, right
from jaxdist.lab.reductions.execute import Run, run, study
from jaxdist.lab.reductions.orders import fit
from jaxdist.lab.reductions.picture import Step, seen
from tests.lab.pages import assert_pasted

COUNTS = {
    "naive": lambda K: (2, K - 1, 2 * (K - 1), K - 1),
    "direct": lambda K: (1, K - 1, K * (K - 1), K - 1),
    "ring": lambda K: (2 * (K - 1), 1, 2 * (K - 1), 2 * (K - 1) / K),
    "halving": lambda K: (2 * log2(K), 1, 2 * (K - 1), 2 * (K - 1) / K),
    "doubling": lambda K: (log2(K), 1, K * log2(K), log2(K)),
    "tree": lambda K: (2 * log2(K), 1, 2 * (K - 1), log2(K)),
    "parameter-server": lambda K: (2, K, 2 * K, K),
}
"""(rounds, peak, total, most sent or received), by the papers, for K a power of two; the last two in arrays."""

ORDERS = {
    "naive": "O(1)/O(K)/O(K)",
    "direct": "O(1)/O(K)/O(K^2)",
    "ring": "O(K)/O(1)/O(K)",
    "halving": "O(log K)/O(1)/O(K)",
    "doubling": "O(log K)/O(1)/O(K log K)",
    "tree": "O(log K)/O(1)/O(K)",
    "parameter-server": "O(1)/O(K)/O(K)",
}


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    """Each on 4 nodes."""
    return {name: run(name, 4, jax.devices()) for name in ALGORITHMS}


def assert_counts(one: Run) -> None:
    rounds, peak, total, most = COUNTS[one.name](one.K)
    assert one.counts == {"rounds": rounds, "peak": peak, "total": total}
    assert max(one.traffic.sent.values()) == max(one.traffic.received.values()) == most * one.array_bytes
    assert right(one)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_sums_and_messages(name, runs):
    assert_counts(runs[name])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_time_of_its_messages_is_the_formula(name, runs):
    alpha, beta, K, S = 14e-6, 2e-11, runs[name].K, runs[name].array_bytes
    assert runs[name].traffic.seconds(alpha, beta) == pytest.approx(ALGORITHMS[name].seconds(K, S, alpha, beta))


@pytest.mark.parametrize("name", ["naive", "ring", "tree"])
def test_on_other_than_powers_of_two_and_parts_that_do_not_divide(name):
    """A tree of three nodes is a star: both others send to node 0 as soon as they can."""
    one = run(name, 3, jax.devices(), size=7)
    assert right(one)
    assert one.counts["rounds"] == {"naive": 2, "ring": 4, "tree": 2}[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_on_eight(name):
    K = 8 - ALGORITHMS[name].server
    one = run(name, K, jax.devices())
    assert right(one) if ALGORITHMS[name].server else not assert_counts(one)


def test_a_wrong_sum_is_seen(monkeypatch):
    """One that forgets a node, and one that only node 0 has."""
    forgets = lambda x, network: star(0, x, replace(network, K=network.K - 1))
    monkeypatch.setitem(ALGORITHMS, "naive", replace(ALGORITHMS["naive"], run=forgets))
    assert not run("naive", 4, jax.devices()).exact
    reduces = lambda x, network: sum([network.send(x, {k: 0}) for k in range(1, network.K)], x)
    monkeypatch.setitem(ALGORITHMS, "naive", replace(ALGORITHMS["naive"], run=reduces))
    one = run("naive", 4, jax.devices())
    assert (one.exact, one.difference > 0.01) == (False, True)
    assert not right(replace(one, exact=True))
    assert not right(replace(one, difference=0.0))


@pytest.mark.parametrize("wrong", [dict(exact=False), dict(difference=0.01)], ids=str)
def test_an_algorithm_that_adds_up_wrongly_fails_its_claim(monkeypatch, wrong):
    """On one number of nodes alone, with the rounds and messages that are claimed."""
    counts = {K: dict(zip(WHAT, COUNTS["ring"](K), strict=False)) for K in SIZES}
    runs = [SimpleNamespace(K=K, counts=counts[K], exact=True, difference=0.0) for K in SIZES]
    monkeypatch.setattr(checks, "study", lambda asked: runs)
    claim = claims()["allreduce-ring"]
    assert CHECKS[claim.id].measure(claim).passed
    vars(runs[-1]).update(wrong)
    told = CHECKS[claim.id].measure(claim)
    assert (told.value, told.passed) == (claim.expected, False)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_counts_of_the_papers_grow_as_claimed(name):
    found = {what: fit(SIZES, [COUNTS[name](K)[place] for K in SIZES]) for place, what in enumerate(WHAT)}
    assert orders(found) == ORDERS[name]


def test_a_fit_decides():
    """What is next best leaves ten times as much."""
    for name in ALGORITHMS:
        for place in range(len(WHAT)):
            counts = [COUNTS[name](K)[place] for K in SIZES]
            least, second = sorted(fit(SIZES, counts).errors.values())[:2]
            assert len(set(counts)) == 1 or second > max(10 * least, 0.01), (name, WHAT[place])
    with pytest.raises(ValueError, match="3 sizes do not tell the orders apart"):
        fit((2, 4, 8), (1, 2, 3))


def test_what_is_drawn_is_what_was_sent():
    told = {name: seen(ALGORITHMS[name], 2, jax.devices()) for name in ("ring", "tree", "parameter-server")}
    assert told["ring"] == [
        Step(1, 0, 1, (0,), (0,)),
        Step(1, 1, 0, (1,), (1,)),
        Step(2, 0, 1, (1,), (0, 1)),
        Step(2, 1, 0, (0,), (0, 1)),
    ]
    assert told["tree"] == [Step(1, 1, 0, (0, 1), (1,)), Step(2, 0, 1, (0, 1), (0, 1))]
    pushes = [Step(1, worker, 2, (0, 1), (worker,)) for worker in (0, 1)]
    assert told["parameter-server"] == [*pushes, *(Step(2, 2, worker, (0, 1), (0, 1)) for worker in (0, 1))]


def test_bytes_into_a_server(monkeypatch):
    """Of 4 workers with 2 GiB each, three times a second."""
    monkeypatch.setattr(checks, "gradient_bytes", lambda: 2 * 2**30)
    claim = replace(claims()["resnet50-ps"], expected="24.2")
    outcome = checks.server(claim, workers=4)
    assert (outcome.value, outcome.passed) == (24, True)
    monkeypatch.setattr(checks, "gradient_bytes", lambda: 1.98 * 2**30)
    assert not checks.server(claim, workers=4).passed


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path, capsys):
    """Of one algorithm, on few nodes."""
    monkeypatch.setattr(all_reduce, "SIZES", (2, 4, 8, 16))
    path = tmp_path / "halving.png"
    asked = ["all-reduce", "--algorithm", "halving", "--devices=4"]
    assert main([*asked, "--picture", str(path)]) == 0
    out = capsys.readouterr().out
    assert "halving    rounds  2 4 6 8 " in out
    assert path.read_bytes().startswith(b"\x89PNG")
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["passed"], told["value"]) == (True, told["expected"])
    assert told["value"] == {"halving": "O(log K)/O(1)/O(K)"}
    (one,) = told["algorithms"]
    assert one["here"] == one["runs"][1]
    assert (one["here"]["most_sent_bytes"], one["here"]["bytes"]) == (96, 6 * 64)
    monkeypatch.setattr(all_reduce, "lecture", lambda: {"halving": "O(log K)/O(1)/O(K^2)"})
    assert main(asked) == 1
    assert "halving grows by O(log K)/O(1)/O(K), the lecture says O(log K)/O(1)/O(K^2)" in capsys.readouterr().out


def test_a_wrong_sum_fails_the_command(runs):
    wrong = replace(runs["ring"], exact=False)
    report = all_reduce.AlgorithmReport("ring", wrong, "", (runs["ring"],) * 4)
    assert report.wrong == "ring does not make the sums of psum on 4 nodes"
    assert not all_reduce.Result(4, [report]).passed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--algorithm", "rng"], "there is no algorithm 'rng' of all-reduce; did you mean 'ring'?"),
        (["--devices", "1"], "--devices 1: an all-reduce has 2 to 64 nodes"),
        (["--devices", "65"], "--devices 65: an all-reduce has 2 to 64 nodes"),
        (
            ["--devices", "6", "--algorithm", "halving"],
            "halving pairs the nodes off in each step, which 6 cannot; ask for 4 or 8 devices",
        ),
        (["--picture", "nowhere/at/all.png"], "picture 'nowhere/at/all.png' cannot be written"),
    ],
)
def test_refused(words, sentence):
    with pytest.raises(RequestError) as error:
        main(["all-reduce", *words])
    assert error.value.problems[0].startswith(sentence)


@pytest.mark.exhaustive
def test_up_to_64_nodes(tmp_path):
    """The claims of orders, that their controls fail, and the page; in one test, because the programs take their time.

    On six nodes those that pair the nodes off are shown without them.
    """
    study((name, K) for name in ALGORITHMS for K in (*SIZES, 6) if not ALGORITHMS[name].refusal(K))
    for name in ("naive", "direct", "ring", "halving"):
        check = CHECKS[f"allreduce-{name}"]
        assert check.measure(claims()[f"allreduce-{name}"]).passed
        assert not check.measure(claims()[f"allreduce-{name}"], **check.control).passed
    CHECKS["allreduce-ring"].measure(claims()["allreduce-ring"]).picture(tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")

    lines = all_reduce.measure(8, "all", "").lines()
    assert_pasted(lines, "tutorials/all-reduce.md")
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120

    six = all_reduce.measure(6, "all", "")
    assert six.passed
    assert [report.name for report in six.reports if report.refused] == ["halving", "doubling"]
    assert any(line.startswith("doubling pairs the nodes off") for line in six.lines())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduce-example", "resnet50-ps"])
def test_the_other_claims(name):
    check = CHECKS[name]
    assert check.measure(claims()[name]).passed
    assert not check.measure(claims()[name], **check.control).passed


def test_every_check_has_a_control_of_one_setting():
    assert {name: len(check.control) for name, check in CHECKS.items()} == dict.fromkeys(CHECKS, 1)
    assert all(claims()[name] for name in CHECKS)
