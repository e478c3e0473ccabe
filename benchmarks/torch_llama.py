"""The train step of a Llama in plain PyTorch, for `bench gpu`: `python torch_llama.py QUESTION ANSWER`, JSON files.

It is written as a careful user would write it: `torch.compile`, fused causal attention, grouped query heads, logits in
chunks so that they never exist as a whole, bfloat16 weights with float32 masters, and fused AdamW. It imports neither
jaxdist nor jax, and runs by its path. Weights that are given have jaxdist's names and shapes; tokens are the same.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

ATTENTION = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION"}
"""Name of a form of attention -> that of PyTorch's kernel, without which it fails instead of taking another."""

CHUNK = 8192
"""Tokens whose logits exist at a time."""


class Block(nn.Module):
    """A layer: attention with grouped query heads, then SwiGLU, each with a norm before and a residual around."""

    def __init__(self, m):
        super().__init__()
        self.size = m.embed // m.heads
        self.shared = m.heads // m.kv_heads
        self.norm1 = nn.RMSNorm(m.embed, eps=1e-5)
        self.norm2 = nn.RMSNorm(m.embed, eps=1e-5)
        self.qkv = nn.Linear(m.embed, (m.heads + 2 * m.kv_heads) * self.size, bias=False)
        self.out = nn.Linear(m.embed, m.embed, bias=False)
        self.gate_up = nn.Linear(m.embed, 2 * m.mlp, bias=False)
        self.down = nn.Linear(m.mlp, m.embed, bias=False)

    def forward(self, x, cos, sin):
        """Apply the layer to [B, S, D], with the cosines and sines of rotary positions."""
        rows, sequence, _ = x.shape
        # As in jaxdist, each key/value head lies with the query heads that share it.
        qkv = self.qkv(self.norm1(x)).view(rows, sequence, -1, self.shared + 2, self.size)
        q, k, v = (a.flatten(2, 3).transpose(1, 2) for a in qkv.split((self.shared, 1, 1), dim=3))
        q = rotate(q, cos, sin)
        k = rotate(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(a.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x, cos, sin):
    """Apply rotary positions: rotate dims i and i + H/2 by the angle of their position, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Llama(nn.Module):
    """Maps tokens to the input of the output table; the table is the embedding too."""

    def __init__(self, m):
        super().__init__()
        self.table = nn.Embedding(m.vocab, m.embed)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.layers))
        self.norm = nn.RMSNorm(m.embed, eps=1e-5)
        size = m.embed // m.heads
        angles = np.arange(m.sequence)[:, None] * m.rope_theta ** -(np.arange(0, size, 2) / size)[None]
        self.register_buffer("cos", torch.tensor(np.cos(angles), dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.tensor(np.sin(angles), dtype=torch.float32), persistent=False)

    def forward(self, tokens):
        """Return the normalised residual stream [B, S, D] of tokens [B, S]."""
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.norm(x)


def nll(x, table, labels):
    """Return the cross-entropy in nats, summed over a chunk of tokens."""
    return F.cross_entropy(F.linear(x, table).float(), labels, reduction="sum")


@torch.no_grad()
def initialise(model: Llama, weights: str) -> None:
    """Draw normal weights of deviation 0.02, or load weights from an .npz file with jaxdist's names."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            deviation = 0.02
            if name.endswith(("out.weight", "down.weight")):
                # Scaled for the number of residual branches (GPT-2).
                deviation = 0.02 / (2 * len(model.blocks)) ** 0.5
            nn.init.normal_(p, std=deviation)
    if not weights:
        return
    arrays = {name: torch.from_numpy(a) for name, a in np.load(weights).items()}
    model.table.weight.copy_(arrays["table"])
    model.norm.weight.copy_(arrays["norm.scale"])
    for index, block in enumerate(model.blocks):
        own = {name.removeprefix("blocks."): a[index] for name, a in arrays.items() if name.startswith("blocks.")}
        block.norm1.weight.copy_(own["norm1.scale"])
        block.norm2.weight.copy_(own["norm2.scale"])
        block.qkv.weight.copy_(own["attention.qkv"].flatten(1).T)
        block.out.weight.copy_(own["attention.out"].flatten(0, 1).T)
        block.gate_up.weight.copy_(own["mlp.gate_up"].flatten(1).T)
        block.down.weight.copy_(own["mlp.down"].T)


class Training:
    """A model, its optimizer, and a batch of random tokens that every step trains on."""

    def __init__(self, options: SimpleNamespace, rows: int, device: str):
        m = SimpleNamespace(**options.model)
        with torch.device(device):
            self.model = Llama(m)
        initialise(self.model, options.weights)
        self.parameters = list(self.model.parameters())
        self.masters = self.parameters
        if options.precision != "float32":
            self.masters = [p.detach().clone().requires_grad_() for p in self.parameters]
            cos = self.model.cos
            sin = self.model.sin
            self.model.to(torch.bfloat16)
            # The angles stay in float32.
            self.model.cos = cos
            self.model.sin = sin
        self.rates = iter(options.optimizer["rates"])
        self.clip = options.optimizer["clip"]
        self.optimizer = self._adamw(options.optimizer)
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, m.vocab, rows * m.sequence + 1)).to(device)
        self.tokens = ids[:-1].view(rows, m.sequence)
        self.labels = ids[1:]
        self.body = self.model
        self.head = nll
        if options.compile:
            self.body = torch.compile(self.model, dynamic=False)
            self.head = torch.compile(nll, dynamic=False)

    def _adamw(self, options: dict) -> torch.optim.AdamW:
        """Return AdamW over the masters; only matrices decay."""
        matrices = [p for p in self.masters if p.ndim > 1]
        vectors = [p for p in self.masters if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": options["weight_decay"]},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, betas=(options["beta1"], options["beta2"]), fused=True)

    def step(self) -> torch.Tensor:
        """Train on the batch; returns its mean loss before the update."""
        hidden = self.body(self.tokens)
        table = self.model.table.weight
        count = self.labels.numel()
        total = 0.0
        # Each chunk runs forward and backward to its hidden states, so that only its own logits exist.
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.flatten(0, 1).split(CHUNK)]
        for chunk, labels in zip(chunks, self.labels.split(CHUNK), strict=True):
            loss = self.head(chunk, table, labels) / count
            loss.backward()
            total = total + loss.detach()
        # The gradients of the chunks then go through the layers once.
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]).view_as(hidden))
        self.update()
        return total

    def update(self) -> None:
        """Clip the gradients, update the masters, and copy them to the parameters."""
        mixed = self.masters is not self.parameters
        if mixed:
            for master, p in zip(self.masters, self.parameters, strict=True):
                master.grad = p.grad.float()
                p.grad = None
        if self.clip:
            nn.utils.clip_grad_norm_(self.masters, self.clip, foreach=True)
        # The learning rates follow jaxdist's schedule.
        rate = next(self.rates)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if mixed:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)


def attention_of(name: str):
    """Return the context in which scaled_dot_product_attention has this form alone; "any" leaves it to PyTorch."""
    if name not in ATTENTION:
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, ATTENTION[name]))


def measured(options: SimpleNamespace, rows: int, phase) -> dict:
    """Train for warm-up and measured steps with this number of rows, and return times, memory and losses."""
    cuda = torch.cuda.is_available()
    phase(f"starting with {rows} rows")
    training = Training(options, rows, "cuda" if cuda else "cpu")
    seconds = []
    losses = []
    for number in range(options.warmup + options.repeats):
        if number in (0, options.warmup):
            phase("measuring" if number == options.warmup else "compiling and warming up")
        # Kernels run asynchronously, so wait for them before the clock is read.
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        losses.append(training.step())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    low, median, high = np.percentile(seconds[options.warmup :], [25, 50, 75]).tolist()
    tokens = training.tokens.numel()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "compiled": options.compile,
        "attention": options.attention,
        "rows": rows,
        "first_step_seconds": seconds[0],
        "step_seconds": median,
        "step_seconds_quartiles": [low, high],
        "tokens_per_second": tokens / median,
        "memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "first_loss": float(losses[0]),
        "loss": float(losses[-1]),
    }


def fitting(options: SimpleNamespace, phase) -> dict:
    """Measure with the requested rows; halve them while memory runs out."""
    rows = options.rows
    while True:
        try:
            with attention_of(options.attention):
                return measured(options, rows, phase)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        # Outside of the handler, so that the exception no longer keeps tensors alive.
        rows //= 2
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def main(question: str, answer: str) -> None:
    """Read the question, measure, and write the answer; beside it, the phases."""
    options = SimpleNamespace(**{"attention": "any", **json.loads(Path(question).read_text())})

    def phase(name: str) -> None:
        with open(f"{answer}.phases", "a") as file:
            file.write(f"{time.time()} {name}\n")

    Path(answer).write_text(json.dumps({"value": fitting(options, phase)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
