"""Recognizes errors of torch, gloo and NCCL by their messages, if they have no exception type."""

import re

__all__ = ["dead_data_worker", "is_lost_connection", "timeout_of", "watchdog_error", "watchdog_timeout"]

_LOST_CONNECTION = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "Connection refused",
    "failed to connect",
    "NCCL communicator was aborted",
    "remote process exited",
)
_GLOO_TIMEOUT = re.compile(r"Timed out waiting (\d+)ms")
_WATCHDOG_TIMEOUT = re.compile(r"Watchdog caught collective operation timeout: .*?Timeout\(ms\)=(\d+)")
_WATCHDOG_ERROR = re.compile(
    r"(?:watchdog thread terminated with exception: |(?=ProcessGroupNCCL's watchdog got stuck))(.{1,300})"
)
# It may continue with advice about shared memory in containers.
_DEAD_DATA_WORKER = re.compile(r"DataLoader worker \(pid.*?(?=\. |\.?$)", re.MULTILINE)


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error, or one that caused it, is that of a connection to a process that has died."""
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:  # a chain may be circular
        chain.append(following)
        following = following.__cause__ or following.__context__
    return any(message in str(link) for link in chain for message in _LOST_CONNECTION)


def timeout_of(error: BaseException) -> float | None:
    """The timeout in seconds, if this is the error of a wait over gloo that timed out; else None."""
    return _seconds(_GLOO_TIMEOUT.search(str(error)))


def watchdog_timeout(stderr: str) -> float | None:
    """The timeout in seconds, if NCCL's watchdog has aborted a process because of one; else None."""
    return _seconds(_WATCHDOG_TIMEOUT.search(stderr))


def watchdog_error(stderr: str) -> str | None:
    """The message of NCCL's watchdog, if it has aborted a process because of an error; else None."""
    found = _WATCHDOG_ERROR.search(stderr)
    return None if found is None else found[1]


def dead_data_worker(error: RuntimeError) -> str | None:
    """How a worker process of a data loader has died, if this is torch's error for that; else None."""
    found = _DEAD_DATA_WORKER.match(str(error))
    return None if found is None else found[0]


def _seconds(milliseconds: re.Match[str] | None) -> float | None:
    return None if milliseconds is None else int(milliseconds[1]) / 1000
