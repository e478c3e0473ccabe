"""What transformers and PEFT make of exported folders. Imports no jax, which another environment may have."""

import json
from pathlib import Path

import numpy as np

BOUND = 1e-5
"""Largest difference, as a fraction of the largest logit."""


def check(out: Path, golden: Path) -> None:
    """The folder has all tensors that transformers looks for, no other, and the logits of the golden one."""
    expected = np.load(golden / "expected.npz")
    check_logits(out, expected["tokens"], expected["logits"])


def check_logits(out: Path, tokens: np.ndarray, logits: np.ndarray) -> None:
    """The folder has all tensors that transformers looks for, no other, and these logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(told.values()), told
    _compare(model, tokens, logits)


def check_adapter(out: Path, tokens: np.ndarray, logits: np.ndarray) -> None:
    """The folder is an adapter that PEFT loads whole onto the base that it names, with these logits."""
    import torch
    from peft import PeftModel
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    base = json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out)
    loaded = {name.replace(".default", "") for name, _ in model.named_parameters() if "lora_" in name}
    assert loaded == load_file(out / "adapter_model.safetensors").keys()
    _compare(model, tokens, logits)


def _compare(model, tokens: np.ndarray, logits: np.ndarray) -> None:
    import torch

    with torch.no_grad():
        found = model.eval()(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(found, logits, rtol=0, atol=BOUND * np.abs(logits).max())


def ids(out: Path, text: str) -> tuple[list[int], int | None, int | None]:
    """The tokens of a text, and those that begin and end one, as `AutoTokenizer` gives them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    return tokenizer(text)["input_ids"], tokenizer.bos_token_id, tokenizer.eos_token_id
