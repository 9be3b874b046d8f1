"""EAGLE's heads: small networks over the target's features and the text itself.

They only say what a head computes. How a draft grows from one is elsewhere: a chain
(``drafters.head_chain``), EAGLE-2's dynamic tree (``drafters.dynamic_tree``), and all
at once (``eagle.parallel``).
"""
