"""The exception for errors that the user can fix."""

import re

__all__ = ["UserError"]


class UserError(ValueError):
    """An error that the user can fix: an unknown key, a missing file, an invalid combination.

    The message is one sentence that names the cause and the fix. The command line prints it to stderr without
    a traceback and exits with a non-zero status. Line breaks become spaces, and control characters are
    escaped, since the message may quote the content of untrusted files.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_printable(message))


def _printable(text: str) -> str:
    text = re.sub(r"\s*[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]\s*", " ", text.strip())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
