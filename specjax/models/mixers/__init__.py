"""Mixers: the parts of a block that look at other positions, one a file."""
