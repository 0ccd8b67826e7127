"""The one exception that stands for a mistake of the user rather than of the code."""

__all__ = ["UserError"]


class UserError(ValueError):
    """A mistake that the user can mend: a wrong key, a missing file, an impossible combination.

    The message is one sentence that names the cause and the mend. The command line prints it alone
    on stderr and exits non-zero; there is never a traceback to read.
    """
