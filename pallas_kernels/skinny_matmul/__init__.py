"""Products of a window's few rows with a large weight, which is read once."""
