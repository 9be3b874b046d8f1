"""Parts of prediction_error.py: what is planted, what is real, and the report."""
