"""Fit constants to measurements: Gauss-Newton with Huber's loss, each constant drawn to what was known of it before.

Constants are given and found by their logarithms. One of which the measurements say nothing stays where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

HUBER = 0.15
"""The error of a logarithm from which on a measurement counts linearly."""

STEPS = 25

Vector = np.ndarray


@dataclass(frozen=True)
class Problem:
    """What a fit minimizes."""

    residuals: Callable[[Vector], Vector]
    """The error of each measurement's logarithm, for these constants."""
    weights: Vector
    """Weight of each measurement: 1 / variance of its logarithm around a model that is right."""
    mean: Vector
    """The constants as they were known before."""
    spread: Vector
    """How well they were known: the spread of each."""
    huber: float = HUBER

    def cost(self, theta: Vector) -> float:
        """Return Huber's loss of the measurements, plus the squared distance of the constants from what was known."""
        size = np.abs(self.residuals(theta))
        loss = np.where(size < self.huber, size**2 / 2, self.huber * (size - self.huber / 2))
        return float((self.weights * loss).sum() + (((theta - self.mean) / self.spread) ** 2).sum() / 2)

    def slopes(self, theta: Vector) -> tuple[Vector, np.ndarray]:
        """Return the gradient of the cost, and its curvature (Gauss-Newton)."""
        at = self.residuals(theta)
        columns = [(self.residuals(theta + 1e-3 * unit) - at) / 1e-3 for unit in np.eye(len(theta))]
        slope = np.stack(columns, 1)
        pull = self.weights * np.where(np.abs(at) < self.huber, 1, self.huber / np.maximum(np.abs(at), 1e-9))
        curve = slope.T @ (pull[:, None] * slope) + np.diag(1 / self.spread**2)
        return slope.T @ (pull * at) + (theta - self.mean) / self.spread**2, curve

    def solve(self) -> Vector:
        """Return the constants that fit best, by damped steps."""
        theta, damping = self.mean.copy(), 1.0
        best = self.cost(theta)
        for _ in range(STEPS):
            down, curve = self.slopes(theta)
            for _ in range(6):
                step = np.linalg.solve(curve + damping * np.diag(np.diag(curve)), down)
                new = theta - np.clip(step, -1, 1)
                found = self.cost(new)
                if found < best:
                    break
                damping *= 4
            if found >= best - 1e-3:
                break
            theta, best, damping = new, found, damping / 3
        return theta

    def open(self, theta: Vector) -> Vector:
        """Return how far the measurements leave each constant open, relative."""
        return np.sqrt(np.diag(np.linalg.inv(self.slopes(theta)[1])))
