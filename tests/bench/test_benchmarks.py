"""The programs of `benchmarks/` that no result has been taken from for long still run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.exhaustive
def test_the_worker_beside_torch_learns_alike_on_every_mesh():
    alone, sharded = worker(), worker("--mesh=2x1x1", "--zero=3")
    assert sharded == pytest.approx(alone, rel=1e-5)
    assert alone[1] < alone[0]


def worker(*options: str) -> list[float]:
    """Its losses in two steps."""
    asked = dict(input="step 2\nquit\n", capture_output=True, text=True, check=True, cwd=FOLDER)
    told = subprocess.run([sys.executable, "jaxdist_gpt.py", *options], **asked).stdout.splitlines()
    return json.loads(told[-1])["losses"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_plain_forms_have_the_loss_of_the_fast_ones(family, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    import forms

    for name, value in dict(LAYERS=1, EMBED=32, HEADS=4, SEQUENCE=32, VOCAB=512, ROWS=2).items():
        monkeypatch.setattr(forms, name, value)
    forms.compare(family, "float32", rounds=1)
    told = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[3:]]
    assert told == [name for name in forms.FORMS if family == "llama" or name != "rotary positions"]
