"""Feed-forward layers, one a file."""
