"""Check what float16 does not go with (`config.float16`)."""

from jaxdist.config import float16
from jaxdist.request.checks.registry import check

check(*float16.KNOBS)(float16.refused)
