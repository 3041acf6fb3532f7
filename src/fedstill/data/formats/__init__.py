"""Readers for the files that datasets are published in; each returns NumPy arrays as `Decoded`."""
