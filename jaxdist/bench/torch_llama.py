"""The train step of a Llama in plain PyTorch, for `bench gpu`: `python torch_llama.py QUESTION ANSWER`, JSON files.

What a careful user would write: `torch.compile`, fused causal attention, query heads in groups, the logits in chunks so
that they never are whole, bfloat16 weights with float32 masters, fused AdamW. No jaxdist here, nor jax: it is run by
its path. Names and shapes of weights that are given are jaxdist's, and so are the tokens.
"""

from __future__ import annotations

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

CHUNK = 8192
"""Tokens whose logits exist at a time."""


class Block(nn.Module):
    def __init__(self, m):
        super().__init__()
        d, self.size = m.embed, m.embed // m.heads
        linear = lambda rows, columns: nn.Linear(rows, columns, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.shared = m.heads // m.kv_heads
        self.qkv, self.out = linear(d, (m.heads + 2 * m.kv_heads) * self.size), linear(d, d)
        self.gate_up, self.down = linear(d, 2 * m.mlp), linear(m.mlp, d)

    def forward(self, x, cos, sin):
        rows, sequence, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, sequence, -1, self.shared + 2, self.size)
        q, k, v = (a.flatten(2, 3).transpose(1, 2) for a in qkv.split((self.shared, 1, 1), dim=3))
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        x = x + self.out(a.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turn(x, cos, sin):
    """Rotary positions: dims i and i + H/2 by the angle of their position."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Llama(nn.Module):
    """Tokens to what the output table multiplies; the table is the embedding too."""

    def __init__(self, m):
        super().__init__()
        self.table = nn.Embedding(m.vocab, m.embed)
        self.blocks = nn.ModuleList(Block(m) for _ in range(m.layers))
        self.norm = nn.RMSNorm(m.embed, eps=1e-5)
        size = m.embed // m.heads
        angles = np.arange(m.sequence)[:, None] * m.rope_theta ** -(np.arange(0, size, 2) / size)[None]
        for name, a in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
            self.register_buffer(name, torch.tensor(a, dtype=torch.float32), persistent=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.norm(x)


def nll(x, table, labels):
    """Cross-entropy in nats, summed over a chunk of tokens."""
    return F.cross_entropy(F.linear(x, table).float(), labels, reduction="sum")


@torch.no_grad()
def begin(model: Llama, weights: str) -> None:
    """Normal weights of deviation 0.02, or those of an .npz file with jaxdist's names."""
    for name, p in model.named_parameters():
        if p.ndim > 1:
            last = name.endswith(("out.weight", "down.weight"))
            nn.init.normal_(p, std=0.02 / (2 * len(model.blocks)) ** 0.5 if last else 0.02)
    if not weights:
        return
    given = {name: torch.from_numpy(a) for name, a in np.load(weights).items()}
    model.table.weight.copy_(given["table"])
    model.norm.weight.copy_(given["norm.scale"])
    for index, block in enumerate(model.blocks):
        of = lambda name: given[f"blocks.{name}"][index]  # noqa: B023
        block.norm1.weight.copy_(of("norm1.scale"))
        block.norm2.weight.copy_(of("norm2.scale"))
        block.qkv.weight.copy_(of("attention.qkv").flatten(1).T)
        block.out.weight.copy_(of("attention.out").flatten(0, 1).T)
        block.gate_up.weight.copy_(of("mlp.gate_up").flatten(1).T)
        block.down.weight.copy_(of("mlp.down").T)


class Training:
    """A model, its update, and a batch of random tokens that every step takes again."""

    def __init__(self, asked: SimpleNamespace, rows: int, device: str):
        m, rule = SimpleNamespace(**asked.model), asked.optimizer
        with torch.device(device):
            self.model = Llama(m)
        begin(self.model, asked.weights)
        self.parameters = list(self.model.parameters())
        self.rates = iter(rule["rates"])
        self.masters, self.clip = self.parameters, rule["clip"]
        if asked.precision != "float32":
            self.masters = [p.detach().clone().requires_grad_() for p in self.parameters]
            cos, sin = self.model.cos, self.model.sin
            self.model.to(torch.bfloat16)
            self.model.cos, self.model.sin = cos, sin  # the angles stay in float32
        groups = [
            dict(params=[p for p in self.masters if (p.ndim > 1) is matrix], weight_decay=rule["weight_decay"] * matrix)
            for matrix in (True, False)
        ]
        self.update = torch.optim.AdamW(groups, betas=(rule["beta1"], rule["beta2"]), fused=True)
        ids = torch.from_numpy(np.random.default_rng(0).integers(0, m.vocab, rows * m.sequence + 1)).to(device)
        self.tokens, self.labels = ids[:-1].view(rows, m.sequence), ids[1:]
        compiled = (lambda f: torch.compile(f, dynamic=False)) if asked.compile else lambda f: f
        self.body, self.head = compiled(self.model), compiled(nll)

    def step(self) -> torch.Tensor:
        """The mean loss of the batch, before the update."""
        hidden, table = self.body(self.tokens), self.model.table.weight
        chunks = [chunk.detach().requires_grad_() for chunk in hidden.flatten(0, 1).split(CHUNK)]
        total, count = 0.0, self.labels.numel()
        for chunk, labels in zip(chunks, self.labels.split(CHUNK), strict=True):
            loss = self.head(chunk, table, labels) / count
            loss.backward()
            total = total + loss.detach()
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]).view_as(hidden))
        self.learn()
        return total

    def learn(self) -> None:
        if self.masters is not self.parameters:
            for master, p in zip(self.masters, self.parameters, strict=True):
                master.grad, p.grad = p.grad.float(), None
        if self.clip:
            nn.utils.clip_grad_norm_(self.masters, self.clip, foreach=True)
        rate = next(self.rates)
        for group in self.update.param_groups:
            group["lr"] = rate
        self.update.step()
        self.update.zero_grad(set_to_none=True)
        if self.masters is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)


def measured(asked: SimpleNamespace, rows: int) -> dict:
    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else lambda: None
    training = Training(asked, rows, "cuda" if cuda else "cpu")
    seconds, losses = [], []
    for _ in range(asked.warmup + asked.repeats):
        wait()
        began = time.perf_counter()
        losses.append(training.step())
        wait()
        seconds.append(time.perf_counter() - began)
    low, median, high = np.percentile(seconds[asked.warmup :], [25, 50, 75]).tolist()
    tokens = training.tokens.numel()
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "compiled": asked.compile,
        "rows": rows,
        "first_step_seconds": seconds[0],
        "step_seconds": median,
        "step_seconds_quartiles": [low, high],
        "tokens_per_second": tokens / median,
        "memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "first_loss": float(losses[0]),
        "loss": float(losses[-1]),
    }


def fitting(asked: SimpleNamespace) -> dict:
    """With as many rows as asked for, or half of them again and again until they fit."""
    rows = asked.rows
    while True:
        try:
            return measured(asked, rows)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def main(question: str, answer: str) -> None:
    asked = SimpleNamespace(**json.loads(Path(question).read_text()))
    Path(answer).write_text(json.dumps({"value": fitting(asked)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
