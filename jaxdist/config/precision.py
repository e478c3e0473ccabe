"""What each precision of a run means: the dtypes of numbers, what is kept, and what is asked of the devices.

    precision   parameters   computes in   kept between steps       loss
    float32     f32          f32           -                        -
    bfloat16    f32          bf16          -                        -
    mixed       f32          bf16          a copy in bf16           -
    float16     f32          f16           -                        scaled
    fp8         f32          bf16          -                        -         matmuls with weights of layers in fp8

Gradients of a micro-batch are in the dtype in which it computes, and are added up and reduced in f32. The f32
parameters are the masters that the optimizer updates.

float16 is the one 16-bit format of GPUs before Ampere (V100, T4), with a range so small that the loss is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["float32", "bfloat16", "mixed", "float16", "fp8"]
"""The precisions of a run."""

Capability = tuple[int, ...]
"""The CUDA compute capability of a GPU, such as (9, 0); empty where a device has none, as CPUs and AMD's GPUs."""


@dataclass(frozen=True)
class Precision:
    """One precision."""

    name: PrecisionName
    compute: Literal["float32", "bfloat16", "float16"]
    """The dtype in which weights are used, and in which activations and gradients of a micro-batch are."""
    keeps_copy: bool = False
    """Whether the weights in that dtype are kept between steps, beside their f32 masters."""
    scales_loss: bool = False
    """Whether the backward pass scales the loss, because small gradients would be zero."""
    float8: bool = False
    """Whether the matmuls with the weights of layers multiply numbers of 8 bits (`parallel.float8`)."""
    rate: float = 1.0
    """FLOP/s of a GPU's matrix units, as a multiple of those in 16 bits."""
    least: Capability = ()
    """The least CUDA compute capability of a GPU that has the format; empty for any."""
    lacking: str = ""
    """What GPUs below that lack."""

    @property
    def width(self) -> int:
        """The bytes of a number in the compute dtype."""
        return 2 if self.casts else 4

    @property
    def casts(self) -> bool:
        """Whether the f32 parameters are cast for use."""
        return self.compute != "float32"

    def on(self, capability: Capability) -> bool:
        """Return whether a GPU of this compute capability has the format.

        One whose capability is not known is taken to have all but fp8, of which there are several.
        """
        return capability >= self.least if capability else not self.float8

    def missing(self, capability: Capability) -> str:
        """Return the sentence that refuses it on GPUs of this compute capability; empty where they have the format."""
        if self.on(capability):
            return ""
        have = " or ".join(name for name, row in PRECISIONS.items() if row.on(capability))
        return f"precision is {self.name}, but these GPUs have no {self.lacking}; set precision to {have}"


AMPERE = (8, 0)
"""The first capability whose matrix units have bfloat16."""

ADA = (8, 9)
"""The first whose matrix units have fp8: E4M3 and E5M2."""

PRECISIONS: dict[str, Precision] = {
    row.name: row
    for row in (
        # The matrix units of a GPU multiply f32 at half the rate of 16 bits (TF32).
        Precision("float32", compute="float32", rate=0.5),
        Precision("bfloat16", compute="bfloat16", least=AMPERE, lacking="bfloat16"),
        Precision("mixed", compute="bfloat16", keeps_copy=True, least=AMPERE, lacking="bfloat16"),
        Precision("float16", compute="float16", scales_loss=True),
        Precision("fp8", compute="bfloat16", float8=True, least=ADA, lacking="fp8"),
    )
}
"""The rows by name."""


def meaning_of_auto(cpu: bool, capability: Capability) -> PrecisionName:
    """Return what `auto` stands for on these devices: bfloat16 on GPUs that have it, float16 on others."""
    if cpu:
        return "float32"
    return "bfloat16" if PRECISIONS["bfloat16"].on(capability) else "float16"
