"""`python examples/weights.py weights.npz`: the weights all four scripts begin with, named and laid out as torch's."""

import sys

import numpy as np
from digits_one_device import CNN
from flax import nnx


def export(path):
    """Kernels of convolutions go from [height, width, in, out] to [out, in, height, width], matrices to [out, in]."""
    model, arrays = CNN(nnx.Rngs(0)), {}
    for name in ("conv1", "norm", "conv2", "head"):
        for key, value in nnx.to_pure_dict(nnx.state(getattr(model, name), nnx.Param)).items():
            dims = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[value.ndim]
            arrays[f"{name}.{'bias' if key == 'bias' else 'weight'}"] = np.asarray(value).transpose(dims).copy()
    np.savez(path, **arrays)


if __name__ == "__main__":
    export(sys.argv[1])
