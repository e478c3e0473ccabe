"""Worker: the same model, weights and update in PyTorch, as a user would write it; one rank of it with `--parallel`.

Ranks find each other by the usual RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed
import torch.nn.functional as F
import work
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Block(nn.Module):
    """One product makes query, key and value, head by head, so that tensor parallelism can split it by its columns."""

    def __init__(self):
        super().__init__()
        d = work.EMBED
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        rows, sequence, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, sequence, -1, 3, work.EMBED // work.HEADS)
        q, k, v = (a.transpose(1, 2) for a in qkv.unbind(3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(work.VOCAB, work.EMBED)
        self.positions = nn.Parameter(torch.zeros(work.SEQUENCE, work.EMBED))
        self.blocks = nn.ModuleList(Block() for _ in range(work.LAYERS))
        self.norm = nn.LayerNorm(work.EMBED)

    def forward(self, tokens, labels):
        x = self.table(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@torch.no_grad()
def load(model: GPT, weights: dict) -> None:
    """Take the weights in; torch's matrices are [out, in]. Biases start at zero and norms at one, as here."""
    tensor = torch.from_numpy
    model.table.weight.copy_(tensor(weights["table"]))
    model.positions.copy_(tensor(weights["positions"]))
    attention, mlp = weights["blocks"]["attention"], weights["blocks"]["mlp"]
    for index, block in enumerate(model.blocks):
        block.qkv.weight.copy_(tensor(attention["qkv"][index].swapaxes(1, 2).reshape(work.EMBED, -1).T))
        block.out.weight.copy_(tensor(attention["out"][index].reshape(-1, work.EMBED).T))
        block.up.weight.copy_(tensor(mlp["up"][index].T))
        block.down.weight.copy_(tensor(mlp["down"][index].T))
        for linear in (block.qkv, block.out, block.up, block.down):
            linear.bias.zero_()


def split(model: GPT, parallel: str, workers: int) -> nn.Module:
    """The model of one rank: PyTorch's own form of data or tensor parallelism, with its defaults."""
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (workers,))
    for block in model.blocks:
        if parallel == "fsdp":
            fully_shard(block, mesh=mesh)
        else:
            columns, rows = ColwiseParallel(), RowwiseParallel()
            parallelize_module(block, mesh, {"qkv": columns, "out": rows, "up": columns, "down": rows})
    return fully_shard(model, mesh=mesh) if parallel == "fsdp" else model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's fastest AdamW; matrices decay, scales and biases do not. It takes no group that is split in part."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for p in model.parameters():
        groups.setdefault((p.ndim >= 2, isinstance(p, DTensor)), []).append(p)
    groups = [dict(params=p, weight_decay=work.WEIGHT_DECAY * matrix) for (matrix, _), p in groups.items()]
    return torch.optim.AdamW(groups, lr=work.LEARNING_RATE, betas=work.BETAS, fused=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parallel", choices=["ddp", "fsdp", "tensor"])
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    model = GPT()
    load(model, work.weights())
    tokens, labels = (torch.from_numpy(a).long() for a in work.batch())
    if args.parallel:
        torch.distributed.init_process_group("gloo")
        rank, workers = torch.distributed.get_rank(), torch.distributed.get_world_size()
        model = split(model, args.parallel, workers)
        if args.parallel != "tensor":
            tokens, labels = tokens.chunk(workers)[rank], labels.chunk(workers)[rank]
    update = adamw(model)

    def take() -> float:
        update.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bfloat16"):
            loss = model(tokens, labels)
        loss.backward()
        update.step()
        return float(loss.detach())

    work.serve(take, matmul, library=f"torch {torch.__version__}", threads=args.threads)
    if args.parallel:
        torch.distributed.destroy_process_group()


def matmul(a, b):
    a, b = torch.from_numpy(a), torch.from_numpy(b)
    out = torch.empty(a.shape[0], b.shape[1])
    return lambda: torch.matmul(a, b, out=out)


if __name__ == "__main__":
    main()
