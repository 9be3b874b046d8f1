"""Window attention: committed cache by length, window rows by ancestor mask."""
