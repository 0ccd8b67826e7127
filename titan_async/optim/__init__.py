"""Optimizers for delayed gradients: Muon and error feedback for any optimizer. Needs torch alone."""

from titan_async.optim.coefficients import (
    POLAR_EXPRESS_COEFFICIENTS,
    STANDARD_COEFFICIENTS,
    resolve_coefficients,
)
from titan_async.optim.delay import DelayedGradients, pipedream_delays
from titan_async.optim.error_feedback import ErrorFeedback
from titan_async.optim.found_inf import set_found_inf
from titan_async.optim.lion import Lion
from titan_async.optim.muon import Muon
from titan_async.optim.orthogonalization import orthogonalize
from titan_async.optim.qk_clip import QKClip, QueryKey

__all__ = [
    "POLAR_EXPRESS_COEFFICIENTS",
    "STANDARD_COEFFICIENTS",
    "DelayedGradients",
    "ErrorFeedback",
    "Lion",
    "Muon",
    "QKClip",
    "QueryKey",
    "orthogonalize",
    "pipedream_delays",
    "resolve_coefficients",
    "set_found_inf",
]
