"""The lecture's claims: each holds as it is, fails with its control, and is told on one page."""

import csv
import json
import re
import sys
from dataclasses import replace

import pytest

from jaxdist.config import RequestError
from jaxdist.lab import claims, page
from jaxdist.lab.__main__ import LABS, main
from jaxdist.lab.claim import LABELS, Check, Claim, Outcome
from jaxdist.lab.reductions.checks import CHECKS as REDUCTIONS
from jaxdist.programs import target
from tests.lab.faults import CACHES, FAULTS
from tests.lab.pages import DOCS, assert_pasted

CHECKS = claims.checks()
SLOW = {
    "fsdp-largest-layer",
    "snapshot-epoch",
    "moe-conditional",
    "cp-ring",
    "strong-scaling",
    "val-reduce",
    "pipeline-2x2",
    "zero-comm-1",
    "zero-comm-2",
    "zero-comm-3",
    "topk-int8-loss",
    "dga-delay",
    "federated-average",
    "ps-direction",
    "ps-equal",
    "topk-only",
    "topk-int8",
    "dgc-ratio",
    "fsdp-reduction",
    "ddp-overlap",
}
"""Those that compile for seconds."""

DEAR = {
    "tip-zero2",
    "fsdp-discard",
    "primitive-uses",
    "fsdp-shardwise-update",
    "allreduce-one-gpu",
    "deepspeed-config",
}
"""Those that only the exhaustive tier runs: others compile nearly the same."""


needs_target = pytest.mark.skipif(not target.available(), reason="JAX's CUDA plug-in is not installed: jaxdist[target]")
FOR_TARGETS = {"ddp-overlap"}
"""Those that compile for GPUs that are not here."""


def marks(id: str) -> list[pytest.MarkDecorator]:
    tiers = [pytest.mark.slow] * (id in SLOW) + [pytest.mark.exhaustive] * (id in DEAR)
    return [*tiers, *[needs_target] * (id in FOR_TARGETS)]


IDS = [pytest.param(id, marks=marks(id)) for id in CHECKS if id not in REDUCTIONS]
"""Those of the reductions have tests of their own, which share their programs."""


SMALLER = {
    "moe-conditional": {"counts": (4, 32)},
    "cp-ring": {"ranks": (4,)},
    "strong-scaling": {"counts": (1, 2), "batch": 8},
}
"""Settings that take less time."""


@pytest.mark.parametrize("id", IDS)
def test_a_claim_holds_and_fails_with_its_control(id):
    """A control changes one setting; a claim without one fails with a fault of the system."""
    claim, control = claims.claims()[id], CHECKS[id].control
    told = claims.measure(claim, **SMALLER.get(id, {}))
    assert told.passed, "\n".join(told.lines())
    if not control:
        assert id in {fault.id for fault in FAULTS}
        return
    assert len(control) == 1
    wrong = claims.measure(claim, **control)
    assert wrong.status == "FAILED"
    assert told.outcome.value != wrong.outcome.value


@pytest.fixture
def broken(monkeypatch):
    """`monkeypatch`, around which nothing that was measured is remembered."""
    for found in CACHES:
        found.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for found in CACHES:
        found.cache_clear()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            one, id=f"{one.id}-{one.system.__name__}", marks=[*one.marks, *[needs_target] * (one.id in FOR_TARGETS)]
        )
        for one in FAULTS
    ],
)
def test_a_claim_fails_where_the_system_is_broken(fault, broken):
    """The check itself is left as it is."""
    fault.system(broken)
    told = claims.measure(claims.claims()[fault.id], **fault.settings)
    assert told.status == "FAILED", "\n".join(told.lines())


def test_each_measured_or_counted_claim_has_a_mistake_of_the_system_that_it_notices():
    """The table names them in words; the functions that make them have these names."""
    found = {id: [] for id in claims.claims()}
    for fault in FAULTS:
        found[fault.id].append(fault.system.__name__.replace("_", " "))
    assert {id: claim.mistakes for id, claim in claims.claims().items()} == found
    labels = {claim.id: claim.label for claim in claims.claims().values()}
    assert set(labels.values()) == set(LABELS)
    assert [id for id, label in labels.items() if label in ("measured", "counted") and not found[id]] == []


def test_what_is_expected_is_no_part_of_a_check():
    """With another table a claim fails: a check has the expected value from nowhere else."""
    claim = claims.claims()["gpt3-min-gpus"]
    measure = CHECKS[claim.id].measure
    assert measure(claim).passed
    assert not measure(replace(claim, expected=str(int(claim.expected) + 1))).passed


def claimed(expected, tolerance) -> Claim:
    return Claim("id", "topic", "measured", "claim", expected, "-", tolerance, "", "")


@pytest.mark.parametrize(
    ("value", "expected", "tolerance", "near"),
    [
        (44, "44", "exact", True),
        (44.001, "44", "exact", False),
        (3.97, "4", "1% at N=1024", True),
        (3.95, "4", "1% at N=1024", False),
        (9e-6, "0", "1e-5", True),
        (-2e-5, "0", "1e-5", False),
        (float("nan"), "0", "1e-5", False),
        (0.01009, "0.01", "1%", True),
        (0.01011, "0.01", "1%", False),
        (-404, "-400", "1%", True),
        (-404.1, "-400", "1%", False),
        (True, "true", "exact", True),
        ("S..1", "S..1", "exact", True),
        ("S..2", "S..1", "exact", False),
    ],
)
def test_a_value_is_as_near_as_the_table_asks(value, expected, tolerance, near):
    assert claimed(expected, tolerance).met(value) is near


def test_a_share_of_another_value():
    claim = claimed("0", "2% of the loss")
    assert claim.met(0.05, of=2.5)
    assert not claim.met(-0.051, of=2.5)


def test_a_tolerance_reads_as_a_sentence():
    assert claims.claims()["straggler"].wanted == "2.0 and 1.0 (x), exactly in the model"
    assert claims.claims()["dga-delay"].wanted == "0 (nats), within 2% of the loss"


def test_the_table_is_read_to_the_letter():
    with claims.TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [vars(claim) for claim in claims.claims().values()] == rows
    assert sorted(claim.id for _, group in claims.topics() for claim in group) == sorted(row["id"] for row in rows)
    assert {claim.id for claim in claims.claims().values() if claim.corrects} == {
        "scaling-70b",
        "scaling-280b",
        "adam-bias",
        "ps-direction",
        "allreduce-one-gpu",
        "fsdp-shardwise-update",
        "adam-extra",
        "chinchilla-table",
        "fsdp-forward-shapes",
        "fsdp-reduction",
        "toy-cross-entropy",
        "snapshot-epoch",
        "snapshot-writers",
    }


def test_the_list_has_every_claim_and_runs_none(capsys, monkeypatch):
    monkeypatch.setattr(claims, "checks", lambda: pytest.fail("imports jax"))
    assert main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {claim.id:<23}{claim.label:<11}{claim.claim}\n" in out for claim in claims.claims().values())


def test_one_claim(capsys, tmp_path):
    picture = tmp_path / "memory.png"
    assert main(["zero-7p5b-1", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    claim = claims.claims()["zero-7p5b-1"]
    assert out.startswith(
        f"zero-7p5b-1 (ZeRO): {claim.claim}\nexpected  {claim.expected} (GB), within 1%\ncounted   31."
    )
    assert out.endswith("PASSED\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["scaling-70b"]) == 0
    assert "Correction: the lecture's table says 2e23: shown as wrong." in capsys.readouterr().out


def test_one_claim_as_json(capsys):
    assert main(["slingshot", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "id": "slingshot",
        "passed": True,
        "label": "looked up",
        "value": 25.0,
        "expected": 25.0,
    }


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["slingshoot"], "there is no lab 'slingshoot'; did you mean 'slingshot'?"),
        (["slingshot", "--picture", "x.png"], "slingshot has no picture; leave --picture out"),
        (["zero-7p5b-1", "--picture", "no/such/x.png"], "picture 'no/such/x.png' cannot be written: its folder does"),
        (["--all", "--output", "no/such/x.html"], "--output 'no/such/x.html' cannot be written"),
        (["--all", "slingshot"], "unexpected argument 'slingshot'"),
    ],
)
def test_mistakes(argv, problem):
    with pytest.raises(RequestError) as error:
        main(argv)
    assert error.value.problems[0].startswith(problem)


def outcome(passed: bool = True, **more) -> Check:
    return Check(lambda claim: Outcome(1.5, passed, **more), {})


@pytest.fixture
def checks(monkeypatch):
    """Checks in place of the real ones, by the id of their claim."""
    return lambda **of: monkeypatch.setattr(
        claims, "checks", lambda: {id.replace("_", "-"): check for id, check in of.items()}
    )


def test_what_is_not_checked_has_not_passed(checks, capsys, tmp_path):
    checks(zero_comm_1=outcome(), slingshot=outcome(passed=False))
    output = tmp_path / "all.html"
    assert main(["--all", "--output", str(output), "--json"]) == 1
    told = {one.pop("id"): one for one in json.loads(capsys.readouterr().out)["claims"]}
    assert told.keys() == claims.claims().keys()
    assert told["zero-comm-1"] == {"passed": True, "label": "counted", "value": 1.5, "expected": 1.0}
    assert told["slingshot"] == {"passed": False, "label": "looked up", "value": 1.5, "expected": 25.0}
    assert told["chinchilla"] == {"passed": False, "label": "looked up", "value": None, "expected": 21.1}
    html = output.read_text()
    assert (html.count(">passed<"), html.count(">FAILED<")) == (2, 2)  # in the table, and in its topic
    assert html.count(">not checked<") == 2 * (len(told) - 2)


def test_a_terminal_shows_which_claim_is_under_way_and_a_file_does_not(checks, capsys, monkeypatch, tmp_path):
    checks(slingshot=outcome())
    argv = ["--all", "--output", str(tmp_path / "all.html")]
    main(argv)
    lines, nothing = capsys.readouterr()
    assert nothing == ""
    assert len(re.findall(r"^(passed|not checked) ", lines, re.MULTILINE)) == len(claims.claims())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(argv)
    same, shown = capsys.readouterr()
    assert same == lines
    last = list(claims.topics())[-1][1][-1].id
    assert shown.endswith(f"\r\033[K{len(claims.claims())} of {len(claims.claims())}: {last}\r\033[K")


def test_what_this_machine_lacks_is_told(checks, capsys):
    def lacks(claim):
        raise RequestError("this machine has 1 device")

    checks(slingshot=Check(lacks, {}))
    assert main(["slingshot"]) == 1
    assert capsys.readouterr().out.endswith("NOT CHECKED: this machine has 1 device\n")


def test_the_exit_code_is_0_when_all_have_passed(checks, capsys, tmp_path):
    checks(**{id: outcome() for id in claims.claims()})
    assert main(["--all", "--output", str(tmp_path / "all.html")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{len(claims.claims())} of {len(claims.claims())}")


def test_the_page_needs_no_network_and_has_the_pictures():
    drawn = ("zero-7p5b-2", "gpt3-years", "pipedream-staleness", "pipedream-bubble", "fsdp-walkthrough")
    told = [claims.measure(claims.claims()[id]) for id in (*drawn, "adam-bias")]
    html = page.page(told)
    words, pictures = re.subn(r'<img alt="[^"]+" src="data:image/png;base64,[^"]+">', "", html)
    assert pictures == sum(one.outcome.picture is not None for one in told) == len(drawn)
    assert re.findall(r"//|<link|<script|<iframe|<img|url\(", words) == []
    for one in told:
        assert f"<code>{one.claim.command}</code>" in html
        assert f'id="{one.claim.id}"' in html
    assert html.count("Correction: ") == 1


def test_labs_keep_their_names():
    """One that is a claim too is told as a lab; `--all` has the claim."""
    assert LABS.keys() & claims.claims().keys() == {"fsdp-walkthrough"}


def test_the_page_for_students_shows_what_is_printed():
    assert_pasted(claims.measure(claims.claims()["zero-7p5b-2"]).lines(), "reference/claims.md")


def test_the_page_lists_every_claim_with_its_label():
    """`scripts/refresh_docs.py docs/reference/claims.md` makes the list; here only names and labels are compared."""
    listed = re.findall(r"^passed {7}(.{11})(\S+)", (DOCS / "reference" / "claims.md").read_text(), re.MULTILINE)
    wanted = [(claim.label, claim.id) for _, group in claims.topics() for claim in group]
    assert [(label.strip(), id) for label, id in listed] == wanted
