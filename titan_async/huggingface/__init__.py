"""The project's models as Hugging Face has them: to and from transformers, and text that a model makes.

Nothing here needs transformers.
"""
