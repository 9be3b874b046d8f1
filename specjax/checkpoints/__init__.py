"""Reading and writing weights and tokenizers."""
