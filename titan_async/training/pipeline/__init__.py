"""The split of a model into pipeline stages, and the schedules that run them."""
