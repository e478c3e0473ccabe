"""What transformers makes of an exported folder. Imports no jax, which another environment may have."""

from pathlib import Path

import numpy as np


def check(out: Path, golden: Path) -> None:
    """The folder has all tensors that transformers looks for, no other, and the logits of the golden one."""
    import torch
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(told.values()), told
    expected = np.load(golden / "expected.npz")
    with torch.no_grad():
        logits = model.eval()(torch.tensor(expected["tokens"])).logits.numpy()
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5 * np.abs(expected["logits"]).max())


def ids(out: Path, text: str) -> tuple[list[int], int | None, int | None]:
    """The tokens of a text, and those that begin and end one, as `AutoTokenizer` gives them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    return tokenizer(text)["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
