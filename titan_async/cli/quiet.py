"""For verbs that print their own lines only."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

__all__ = ["quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences torchtitan's remarks about configurations and CPUs, and those of data loaders about torch."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module="torchtitan")
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            yield
    finally:
        logging.disable(before)
