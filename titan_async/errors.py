"""The one exception that stands for a mistake of the user rather than of the code."""

import re

__all__ = ["UserError"]


class UserError(ValueError):
    """A mistake that the user can mend: a wrong key, a missing file, an impossible combination.

    The message is one sentence that names the cause and the mend. The command line prints it alone
    on stderr and exits non-zero; there is never a traceback to read. Line breaks in it become spaces, and
    what a terminal would obey rather than print is escaped: it may quote names and values of anybody's files.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message))


def _printable(text: str) -> str:
    text = re.sub(r"\s*[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]\s*", " ", text.strip())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
