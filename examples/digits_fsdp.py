"""Handwritten digits, a small CNN with batch norm: torch's FSDP2. (*): not on one device."""

import sys

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh  # (*)
from torch.distributed.fsdp import fully_shard  # (*)

ROWS, STEPS = 64, 40


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv1(x)))
        return self.head(F.relu(self.conv2(x)).mean((2, 3)))


def batches(rank, world):
    digits, rng = load_digits(), np.random.default_rng(0)
    images = digits.images[:, None].astype("float32") / 16
    for _ in range(STEPS):
        rows = rng.choice(len(images), ROWS, replace=False)
        rows = np.split(rows, world)[rank]  # (*)
        yield torch.from_numpy(images[rows]), torch.from_numpy(digits.target[rows])


if __name__ == "__main__":
    dist.init_process_group("gloo")  # (*)
    rank, world = dist.get_rank(), dist.get_world_size()  # (*)
    model = CNN()
    model.load_state_dict({name: torch.from_numpy(a) for name, a in np.load(sys.argv[1]).items()}, strict=False)
    # (*) On GPUs: model = nn.SyncBatchNorm.convert_sync_batchnorm(model). It refuses to run on CPUs.
    mesh = init_device_mesh("cpu", (world,))  # (*)
    for part in (model.conv1, model.conv2, model.head, model):  # (*)
        fully_shard(part, mesh=mesh)  # (*)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    for step, (images, labels) in enumerate(batches(rank, world)):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world  # (*)
        dist.all_reduce(mean)  # (*)
        if rank == 0:  # (*)
            print(f"step {step}  loss {mean:.6f}")
    dist.destroy_process_group()  # (*)
