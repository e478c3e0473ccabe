"""The Llama in PyTorch that `bench gpu` compares with is the same model, trained the same way."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist.bench import gpu_child
from jaxdist.bench.measuring import Timed
from jaxdist.request import load
from jaxdist.sharding import name_of
from jaxdist.training.run import Run

torch_llama = pytest.importorskip("torch") and pytest.importorskip("benchmarks.torch_llama")

pytestmark = pytest.mark.slow

TINY = {
    "mesh": "1x1x1", "model.family": "llama", "model.layers": "2", "model.embed": "64", "model.heads": "4",
    "model.kv_heads": "2", "model.mlp": "96", "model.vocab": "300", "model.sequence": "48", "optimizer.warmup": "2",
    "optimizer.learning_rate": "0.01", "train.global_batch_size": "4",
}  # fmt: skip
STEPS = 4
quiet = lambda doing: None


def test_the_losses_are_those_of_jaxdist(tmp_path, monkeypatch):
    """From the same weights, on the same tokens, before and after updates that clip and decay."""
    timed = Timed.compile(Run(load(None, TINY)))
    timed.place(quiet)
    weights = tmp_path / "weights.npz"
    leaves = jax.tree.leaves_with_path(timed._state.params)
    np.savez(weights, **{name_of(path): np.asarray(leaf) for path, leaf in leaves})
    losses = [timed.advance(quiet) and timed.loss for _ in range(STEPS)]

    monkeypatch.setattr(torch_llama, "CHUNK", 64)  # three chunks of logits
    asked = gpu_child._for_torch(timed.run.config, STEPS)
    asked |= dict(rows=4, weights=str(weights), warmup=1, repeats=STEPS - 1, compile=False)
    question, answer = tmp_path / "question", tmp_path / "answer"
    question.write_text(json.dumps(asked))
    torch_llama.main(str(question), str(answer))
    found = json.loads(answer.read_text())["value"]
    assert losses[0] - losses[-1] > 0.3
    assert (found["first_loss"], found["loss"]) == pytest.approx((losses[0], losses[-1]), abs=1e-4)
    assert (found["rows"], found["compiled"]) == (4, False)
    assert found["tokens_per_second"] == pytest.approx(4 * 48 / found["step_seconds"])


def test_in_bfloat16_it_begins_where_it_should_and_learns():
    """Masters in float32 beside it: updates too small for bfloat16 add up."""
    config = load(None, TINY | {"precision": "bfloat16", "optimizer.learning_rate": "1e-4"})
    asked = gpu_child._for_torch(config, 12) | dict(rows=4, weights="", warmup=1, repeats=11, compile=False)
    training = torch_llama.Training(SimpleNamespace(**asked), 4, "cpu")
    losses = [float(training.step()) for _ in range(12)]
    assert losses[0] == pytest.approx(np.log(300), abs=0.3)
    assert losses[-1] < losses[0]
    dtypes = {p.dtype for p in training.parameters}, {p.dtype for p in training.masters}
    assert dtypes == ({torch_llama.torch.bfloat16}, {torch_llama.torch.float32})
    assert training.model.cos.dtype == torch_llama.torch.float32


def test_where_memory_runs_out_rows_are_halved(monkeypatch):
    tried = []

    def measured(asked, rows, phase):
        tried.append(rows)
        if rows > 2:
            raise torch_llama.torch.OutOfMemoryError("CUDA out of memory")
        return {"rows": rows}

    monkeypatch.setattr(torch_llama, "measured", measured)
    assert torch_llama.fitting(SimpleNamespace(rows=8, attention="any"), print) == {"rows": 2}
    assert tried == [8, 4, 2]
