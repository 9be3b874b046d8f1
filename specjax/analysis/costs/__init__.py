"""Costs measured on a device, and what follows from them for each drafter.

``rounds``, ``drafting`` and ``machine`` say what is timed, ``timing`` times it in turn,
and ``session`` does all of it; ``calibrated`` is what is kept. ``sample`` says how well
a drafter drafts (``scripted``: without the model), ``predict`` puts both into the law,
``judge`` does that for every drafter, and ``oddities`` reads the curve.
"""
