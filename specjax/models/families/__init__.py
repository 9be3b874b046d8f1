"""Families: a checkpoint layout each, translated to the one decoder. No maths."""
