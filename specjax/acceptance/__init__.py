"""Acceptance rules, one a file, and the cut that ends a path."""
