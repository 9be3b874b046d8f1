"""Pallas kernels, one folder an operation; each has a plain JAX reference."""
