"""Check what a scaled loss, that of float16, does not go with (`config.scaled_loss`)."""

from jaxdist.config import scaled_loss
from jaxdist.request.checks.registry import check

check(*scaled_loss.KNOBS)(scaled_loss.refused)
