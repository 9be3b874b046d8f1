"""Kernels compiled for devices that are not there, and what the programs must show."""
