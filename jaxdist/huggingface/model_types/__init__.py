"""The types of transformers that can be read and written: a file for each family, with a row for each type."""

from __future__ import annotations

from jaxdist.huggingface.keys import ModelType
from jaxdist.huggingface.model_types import (
    apertus,
    deepseek,
    experts,
    gemma,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    llama,
    olmo,
    phi3,
    smollm3,
    starcoder2,
)

MODEL_TYPES: dict[str, ModelType] = {
    **llama.TYPES,
    **olmo.TYPES,
    **smollm3.TYPES,
    **gpt_neox.TYPES,
    **apertus.TYPES,
    **starcoder2.TYPES,
    **phi3.TYPES,
    **gemma.TYPES,
    **experts.TYPES,
    **granite.TYPES,
    **deepseek.TYPES,
    **gpt_oss.TYPES,
    **gpt2.TYPES,
}
"""The types by their names in `model_type`. Of several that compute a model, the first is written."""
