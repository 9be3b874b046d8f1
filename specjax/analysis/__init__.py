"""What the counters say: speed-up law, metrics, reports."""
