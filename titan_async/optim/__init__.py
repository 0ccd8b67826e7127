"""Optimizers for delayed gradients: Muon and error feedback for any optimizer. Needs torch alone."""

from titan_async.optim.coefficients import POLAR_EXPRESS_COEFFICIENTS, STANDARD_COEFFICIENTS
from titan_async.optim.error_feedback import ErrorFeedback
from titan_async.optim.lion import Lion
from titan_async.optim.muon import Muon
from titan_async.optim.orthogonalization import orthogonalize

__all__ = [
    "POLAR_EXPRESS_COEFFICIENTS",
    "STANDARD_COEFFICIENTS",
    "ErrorFeedback",
    "Lion",
    "Muon",
    "orthogonalize",
]
