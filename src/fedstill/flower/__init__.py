"""Flower as the network: the same methods in its simulation engine, and between machines."""
