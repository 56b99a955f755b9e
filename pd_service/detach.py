"""A service in the background: the parent shows the start and returns, the child goes on and writes to a log.

The child tells through a pipe of its own, which nobody else inherits, so that its end is seen at once:

    parent ◄── what a terminal would show, then READY or the end of the pipe ── child ──► log
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

READY = "\x04"  # the last character of a start that succeeded


def start_in_background(command: Sequence[str], log: Path, show: Callable[[str], None]) -> int:
    """Starts `command --report-fd N` and shows what it tells. Returns its exit code if it ended, 0 when it is ready."""
    log.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    with log.open("a") as output:
        child = subprocess.Popen(
            [*command, "--report-fd", str(write_end)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            start_new_session=True,  # the terminal's end and its Ctrl-C are none of its business
        )
    os.close(write_end)
    try:
        if _relay(read_end, show):
            return 0
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
    return child.wait()


def _relay(read_end: int, show: Callable[[str], None]) -> bool:
    """Whether the child has said that it is ready."""
    with open(read_end, encoding="utf-8") as pipe:
        for line in pipe:
            show(line.removesuffix(READY))
            if line.endswith(READY):
                return True
    return False


class Report:
    """The child's end of the pipe: what its consoles show goes there until it is ready, then to its own output."""

    def __init__(self, fd: int, consoles: Sequence[Console]) -> None:
        os.set_inheritable(fd, False)
        self._pipe = os.fdopen(fd, "w", encoding="utf-8", buffering=1)
        self._consoles = consoles
        for console in consoles:
            console.file = self._pipe

    def ready(self) -> None:
        """A parent that is gone needs to hear nothing."""
        for console in self._consoles:
            console.file = sys.stdout
        try:
            self._pipe.write(READY)
            self._pipe.close()
        except BrokenPipeError:
            return
