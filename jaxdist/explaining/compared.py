"""A kind of collective over one set of axes: what theory predicts beside what a compiled program moves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxdist.planning.predicted_collectives import ALL_REDUCE

PACKED = 32
"""Elements that may be packed scalars: more than a step sums over one set of axes."""

WIDEST_SCALAR = 4
"""Bytes of the widest scalar that a step sums."""

Key = tuple[tuple[str, ...], str]
"""(mesh axes, kind) of a collective."""


@dataclass(frozen=True)
class Row:
    """One kind of collective over one set of axes in one step: predicted and compiled."""

    axes: tuple[str, ...]
    kind: str
    what: tuple[str, ...]
    """The predicted purposes."""
    predicted_elements: int
    elements: int
    """Elements in the program, without scalars."""
    predicted_bytes: int
    payload_bytes: int
    """Bytes in the program, without scalars."""
    wire_bytes: float
    """Bytes that one device sends, by the ring algorithms; scalars included."""
    calls: int
    widened: bool
    """Whether the compiler may send f32 for bfloat16, as XLA:CPU does."""
    has_prediction: bool = True
    """Whether there is a prediction at all."""

    @property
    def as_predicted(self) -> bool:
        """Whether the program agrees with the prediction, to the element and byte, packed scalars aside."""
        return self.has_prediction and not self._more_elements and not self._more_bytes

    @property
    def remark(self) -> str:
        """Why the two differ; empty where they do not."""
        if not self.has_prediction:
            return "not predicted"
        if self.difference:
            return f"NOT PREDICTED: {self.difference}"
        if self.elements > self.predicted_elements:
            return f"{self.elements - self.predicted_elements} packed scalars"
        if self.payload_bytes > self.predicted_bytes:
            return "sent in f32, as XLA:CPU sends bfloat16"
        return ""

    @property
    def difference(self) -> str:
        """By how much the program differs from the prediction; empty where it does not."""
        if self._more_elements:
            return f"{self._more_elements:+,} elements"
        if self._more_bytes:
            return f"{self._more_bytes:+,} bytes, in as many elements"
        return ""

    @property
    def both(self) -> str:
        """The predicted and the compiled numbers, in words."""
        return (
            f"{self.kind} over {'+'.join(self.axes)}: predicted {self.predicted_elements:,} elements in "
            f"{self.predicted_bytes:,} bytes, compiled {self.elements:,} in {self.payload_bytes:,}"
        )

    def without(self, elements: int, width: int) -> Row:
        """Return this row with `elements` of `width` bytes taken off the prediction.

        The numbers of the compiled program stay.
        """
        return replace(
            self,
            predicted_elements=self.predicted_elements - elements,
            predicted_bytes=self.predicted_bytes - width * elements,
        )

    @property
    def _more_elements(self) -> int:
        """The elements that the program moves beyond the prediction."""
        more = self.elements - self.predicted_elements
        # XLA:GPU packs scalars into small vectors, which only their size shows to be scalars.
        if self.kind == ALL_REDUCE and 0 < more <= PACKED:
            return 0
        return more

    @property
    def _more_bytes(self) -> int:
        """The bytes that the program moves beyond the prediction."""
        more = self.payload_bytes - self.predicted_bytes
        packed = WIDEST_SCALAR * (self.elements - self.predicted_elements)
        allowed = packed
        if self.widened:
            # In f32, bfloat16 takes twice the bytes.
            allowed += self.predicted_bytes
        if 0 <= more <= allowed:
            return 0
        return more
