"""Draft heads against the outputs of their authors' own code.

One file a kind of drafter says how to replay an oracle's two rounds through the parts
that ``propose`` and ``observe`` are made of; ``check`` compares what comes out, once
with the features that the oracle stores and once with those of our own target.
"""
