"""Models: CPU support, tied weights, and the Hugging Face format."""
