"""The parts of ``decode_speed.py``: arms, measurements, figures, report.

Nothing here may import JAX before ``machine.pin`` was called: XLA counts the cores it
may use once.
"""
