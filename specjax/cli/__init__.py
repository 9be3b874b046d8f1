"""The command line; it may import every other package, and none imports it."""
