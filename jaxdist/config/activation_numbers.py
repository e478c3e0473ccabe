"""The numbers of activations that are not learned. Pure data."""

XIELU_BETA = 0.5
XIELU_EPS = -1e-6
"""Of xIELU (Huang and Schlag 2024, section 3)."""

SWIGLU_SLOPE = 1.702
SWIGLU_LIMIT = 7.0
"""Of the clamped SwiGLU of gpt-oss (OpenAI 2025)."""
