"""Make the tiny adapters of tests/huggingface/golden_adapters with PEFT, and the logits that it computes with them.

    pip install torch==2.13.0 transformers==5.24.0 peft==0.21.2
    python scripts/golden_peft.py tests/huggingface/golden_adapters

Each folder holds an adapter, with random numbers, of the base of the same name in tests/huggingface/golden;
`expected.npz` has the logits [1, S, V], in float32, of the first row of the base's own `expected.npz`. That of GPT-2 is
as an export of jaxdist has it: B is zero but for a block each for queries, keys and values. Run it where the repository
lies. Running it again with the same versions makes the same bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

BASES = Path("tests/huggingface/golden")

ADAPTERS = {
    "llama31": dict(
        r=4,
        lora_alpha=12,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    ),
    "qwen3_moe": dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj"]),
    "deepseek_v3": dict(
        r=2, lora_alpha=6, target_modules=["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
    ),
    "gpt2": dict(
        r=2,
        lora_alpha=4,
        target_modules=["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"],
        rank_pattern={"c_attn": 6},
        alpha_pattern={"c_attn": 12},
        fan_in_fan_out=True,
    ),
}
"""The settings of each adapter, by the name of its base."""


def base_of(folder: Path) -> torch.nn.Module:
    """Return the model in a folder, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def logits_of(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Return the logits [B, S, V]."""
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.numpy()


def fill(model: torch.nn.Module) -> None:
    """Put random numbers into the adapters of a model."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        numbers = torch.randn_like(parameter) * 0.1
        if "c_attn.lora_B" in name:
            out, rank = numbers.shape
            blocks = [torch.ones(out // 3, rank // 3)] * 3
            numbers = numbers * torch.block_diag(*blocks)
        parameter.data.copy_(numbers)


def write(name: str, folder: Path) -> None:
    """Write one adapter, read it back with PEFT, and keep the logits of what was read."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **ADAPTERS[name])
    model = peft.get_peft_model(base_of(BASES / name), config)
    fill(model)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    # Their order changes from one process to the next.
    written = json.loads((folder / "adapter_config.json").read_text())
    written["target_modules"] = sorted(written["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    tokens = np.load(BASES / name / "expected.npz")["tokens"][:1]
    loaded = peft.PeftModel.from_pretrained(base_of(BASES / name), folder)
    np.savez(folder / "expected.npz", logits=logits_of(loaded, tokens))


def main() -> None:
    """Write every adapter, or those that are named, and print its size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write the folders into")
    parser.add_argument("names", nargs="*", help="folders to write alone")
    asked = parser.parse_args()
    out = asked.out
    for name in asked.names or ADAPTERS:
        write(name, out / name)
        print(f"{name}: {sum(path.stat().st_size for path in (out / name).iterdir()):,} bytes")


if __name__ == "__main__":
    main()
