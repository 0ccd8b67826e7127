"""Models in Hugging Face's format: export, import, and text generation. Nothing here needs transformers."""
