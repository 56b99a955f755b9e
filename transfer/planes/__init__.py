"""Data planes: ways to move KV bytes between two engines. `base` holds the contract all of them keep."""

from __future__ import annotations

from transfer.planes.base import Plane
from transfer.planes.memory import MemoryPlane
from transfer.planes.mooncake import MooncakePlane
from transfer.planes.shm import ShmPlane
from transfer.planes.tcp import TcpPlane

PLANE_NAMES = ("memory", "shm", "mooncake", "tcp")  # best first


def make_plane(name: str, *, host: str) -> Plane:
    """The plane of that name; `host` is the address of this machine that other engines reach it at.

    Raises ValueError for a name that is not in PLANE_NAMES.
    """
    if name == "memory":
        return MemoryPlane()
    if name == "shm":
        return ShmPlane()
    if name == "mooncake":
        return MooncakePlane(host)
    if name == "tcp":
        return TcpPlane(host)
    raise ValueError(f"unknown data plane {name!r}, known are {', '.join(PLANE_NAMES)}")
