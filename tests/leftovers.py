"""What a process holds and what its objects remember: to be compared before and after."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Held(NamedTuple):
    """Pools of threads grow for a while: the event loop's own is not counted, one of pulls by its first thread."""

    descriptors: int
    shared_mappings: int  # of memory without a name: KV caches, here and elsewhere
    threads: int
    tasks: int

    def covers(self, later: Held) -> bool:
        """Nothing has become more; what others had left behind may be gone by now."""
        return all(now <= before for now, before in zip(later, self, strict=True))


def held_by_this_process() -> Held:
    """To be called in the loop whose tasks are counted."""
    gc.collect()
    threads = [thread for thread in threading.enumerate() if not re.match(r"asyncio_|pull_[1-9]", thread.name)]
    return Held(
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        shared_mappings=Path("/proc/self/maps").read_text().count("/memfd:"),
        threads=len(threads),
        tasks=len(asyncio.all_tasks()),
    )


def table_sizes(roots: Sequence[object]) -> dict[str, int]:
    """Sizes of all containers reachable through attributes of our own objects, by path."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    left = [(type(root).__name__ + str(i), root) for i, root in enumerate(roots)]
    while left:
        path, thing = left.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | set | list | deque):
            sizes[path] = len(thing)
            values = thing.values() if isinstance(thing, dict) else thing
            left += [(f"{path}[{i}]", value) for i, value in enumerate(values)]
        elif isinstance(thing, asyncio.Queue):
            sizes[path] = thing.qsize()
        elif type(thing).__module__.partition(".")[0] in ("pd_service", "kv_cache", "transfer"):
            slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
            names = [*getattr(thing, "__dict__", {}), *slots]
            left += [(f"{path}.{name}", getattr(thing, name)) for name in names if hasattr(thing, name)]
    return sizes
