"""The command line; it may import every other package, and none imports it."""

from __future__ import annotations

from specjax.cli.main import main

__all__ = ["main"]
