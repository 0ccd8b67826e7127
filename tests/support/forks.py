"""Python commands as forks of a process that has imported their modules.

A training run of two ranks starts three interpreters, each of which imports torch and torchtitan for several
seconds. Here the launcher is a fork of the same server process as the workers of `WorkerPool`, and its ranks
are forks of the launcher. Process ids, signals, sessions, exit statuses, environment, folder, `sys.argv` and
`__main__` are those of a new interpreter. But ranks share one hash seed, modules are not imported again, and
/proc shows the environment and the command line of the server: tests of these use `subprocess`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import logging
import multiprocessing as mp
import os
import runpy
import signal
import subprocess
import sys
import termios
import threading
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import IO, Any, NoReturn

__all__ = ["Forked", "context", "run"]

_PR_SET_NAME = 15
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def context() -> Any:
    """The `multiprocessing` context of processes that have imported `tests.support.imports`."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.imports"])
    return context


class Forked:
    """A command that runs as a fork, with the interface of `subprocess.Popen` with text pipes.

    Args:
        command: `[sys.executable, "-m", module, *arguments]`, or with "-c" and a program, or a script.
        cwd: its working directory; by default that of this process.
        env: its environment; by default that of this process.
        start_new_session: whether it starts a new session and process group.
        stdout, stderr: `subprocess.PIPE`, or an open file.
        terminal: a terminal's descriptor, which becomes its stdout, stderr and controlling terminal.
    """

    def __init__(
        self,
        command: Sequence[object],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
        stdout: int | IO[str] = subprocess.PIPE,
        stderr: int | IO[str] = subprocess.PIPE,
        terminal: int | None = None,
    ) -> None:
        self.args = [os.fspath(word) if isinstance(word, Path) else str(word) for word in command]
        reads: list[IO[str] | None] = [None, None]
        writes = [terminal, terminal] if terminal is not None else [-1, -1]
        if terminal is None:
            for index, wanted in enumerate((stdout, stderr)):
                if wanted == subprocess.PIPE:
                    read, writes[index] = os.pipe()
                    reads[index] = os.fdopen(read, encoding="utf-8", errors="replace")
                else:
                    writes[index] = os.dup(wanted.fileno())
        self.stdout, self.stderr = reads
        self._process = context().Process(
            target=_begin,
            args=(
                self.args,
                str(cwd or Path.cwd()),
                dict(os.environ if env is None else env),
                [_Duplicate(fd) for fd in writes],
                start_new_session,
                terminal is not None,
            ),
        )
        self._process.start()
        for write in set(writes):
            os.close(write)
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end, and returns the rest of stdout and stderr."""
        deadline = None if timeout is None else time.monotonic() + timeout
        texts: dict[int, str] = {}

        def read(index: int, pipe: IO[str]) -> None:
            texts[index] = pipe.read()

        readers = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in enumerate((self.stdout, self.stderr))
            if each[1] is not None
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if deadline is None else max(deadline - time.monotonic(), 0))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(deadline - time.monotonic(), 0.1))
        return texts.get(0, ""), texts.get(1, "")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Runs a command as a fork, as `subprocess.run` does with `capture_output` and `text`."""
    forked = Forked(command, cwd=cwd, env=env)
    try:
        out, err = forked.communicate(timeout)
    finally:
        forked.kill()
    return subprocess.CompletedProcess(forked.args, forked.wait(60), out, err)


class _Duplicate:
    """A descriptor that is passed to a process when it starts."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _detached, (DupFd(self._fd),)


def _detached(duplicate: Any) -> int:
    return duplicate.detach()


def _begin(
    command: list[str],
    cwd: str,
    env: dict[str, str],
    outputs: list[int],
    start_new_session: bool,
    in_terminal: bool,
) -> None:
    """The main function of the fork, which runs the command."""
    for number, fd in enumerate(outputs, start=1):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(cwd)
    if start_new_session or in_terminal:
        os.setsid()
    if in_terminal:
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)
    # torchelastic starts ranks with this class.
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _Rank
    _execute(command, env)


class _Rank:
    """A fork of this process that runs a rank's command, with the part of `Popen` that torchelastic uses."""

    def __init__(
        self, args: Sequence[str], env: Mapping[str, str], stdout: Any, stderr: Any, start_new_session: bool
    ) -> None:
        self.args, self.returncode = list(args), None
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # The fork must not run this process's handlers before its own are set.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        self.pid = os.fork()
        if self.pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        else:
            for number in _HANDLED:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            wakeup = signal.set_wakeup_fd(-1)
            if wakeup != -1:
                os.close(wakeup)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            logging.disable(logging.NOTSET)
            if start_new_session:
                os.setsid()
            for number, file in enumerate((stdout, stderr), start=1):
                if file is not None:
                    os.dup2(file.fileno(), number)
            ctypes.CDLL(None).prctl(_PR_SET_NAME, f"rank {env['RANK']}".encode())
            _execute(self.args, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _execute(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Runs a command as `python` would, and ends this process."""
    # Temporary folders of the parent are removed by the parent only.
    weakref.finalize._registry.clear()
    # Child processes, such as data workers, start as in a new interpreter.
    mp.set_start_method(None, force=True)
    os.environ.clear()
    os.environ.update(env)
    # With the buffering of a new interpreter for a pipe or a terminal.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    arguments = [word for word in command[1:] if word != "-u"]
    status = 1
    try:
        if arguments[0] == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = arguments[1:]
            sys.modules.pop(arguments[1], None)
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path.insert(0, str(Path(arguments[0]).parent))
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()  # joins threads, as the end of an interpreter does
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)
