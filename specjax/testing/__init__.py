"""Toy targets, independent references and the conformance suite."""
