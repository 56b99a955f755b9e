"""How much memory of this host a process may still take. Imports nothing, so that it can be asked before anything."""

from __future__ import annotations

from pathlib import Path

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """The less of what the host has free, files it can drop included, and of what a container's limit leaves."""
    lines = meminfo.read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if not limit.is_file() or (text := limit.read_text().strip()) == "max":
        return free
    return min(free, max(0, int(text) - int(used.read_text())))
