"""Target models: one hybrid decoder, its mixers and its families."""
