"""Differential privacy: what it costs, and what it promises."""
