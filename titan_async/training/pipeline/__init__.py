"""How a model is split into pipeline stages, and which schedule runs them."""
