"""Lets reads in until it is closed, and closing waits for those inside.

Memory may be unmapped once `close` has returned, so nobody may still be copying then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transfer.planes.base import PlaneError


class Gate:
    """`what` names the thing behind it in the error of those who come too late."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """Raises PlaneError once the gate is closed; called by those inside, often."""
        if self._closed:
            raise PlaneError(f"{self._what} was closed")

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Raises PlaneError when the gate is closed."""
        with self._changed:
            self.check()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def close(self, interrupt: Callable[[], None] | None = None) -> None:
        """Lets nobody in any more, calls `interrupt` to hurry those inside, and returns when all have left."""
        with self._changed:
            self._closed = True
        if interrupt is not None:
            interrupt()
        with self._changed:
            self._changed.wait_for(lambda: self._inside == 0)
