"""Trained models that take raw inputs: what describes one, what predicts with it, and what exports it."""

from fedstill.inference.predictor import Predictor

__all__ = ["Predictor"]
