"""Gated delta windows: outputs without writing the state, and commit of a path."""
