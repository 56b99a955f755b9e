"""How fast KV moves between two processes, beside the bounds of this machine and, when their Python is given, peers.

A cell is one model's cache, one block size, one prompt length and one kind of block tables; in each cell all systems
move the same runs. What is compared takes turns, since speeds of a shared machine drift: our planes first with their
bounds, then with the peers. A bar is the median of the turns' ratios; every destination is checked by bytes once per
system and cell.

    shm            memcpy         one thread, as many bytes between two mapped areas
    tcp            raw            one loopback stream, received into one area
    shm            NIXL           as its users run it: a progress thread on either side, ordinary memory
    shm            NIXL, tuned    the best of it here: no progress thread at the reader, huge pages as our cache has
    tcp            NIXL over tcp  and the same, tuned
    tcp, shm       Mooncake       its tcp transport, 64 pieces a call; also our plane on the same library

Shared memory read in pieces of a block of 16 tokens (2 to 16 KiB) is observed without an aim: at random places each
piece pays for address translation and a start of its own, which one long copy does not. How long the plans take is in
`benchmarks/transfer_plan.py`.

    python -m benchmarks.transfer --json --peer-python /path/to/peers/bin/python
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Bar, arguments, publish
from benchmarks.transfer_cells import MODELS, Cell, cache_tokens, cells, erase, first_wrong, flat, layout
from benchmarks.transfer_holder import TOKEN, Cache, Holder
from benchmarks.transfer_plan import plan_bars
from benchmarks.transfer_sides import Memcpy, Ours, Peer, PeerMemory, RawStream, Side
from transfer.planes import PLANE_NAMES, make_plane

PROMPTS = (128, 1024, 8192)
BLOCK_SIZES = (16, 128)
PLANES = tuple(name for name in PLANE_NAMES if name != "memory")  # that one stays in a process
CELL_S = 3.0  # a cell's turns take about so long, within these limits
MIN_TURNS, MAX_TURNS = 5, 25


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerKind:
    """A system that `transfer_peer.py` knows, and the environment it runs in."""

    system: str
    env: Mapping[str, str]
    tuned: bool = False


QUIET = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error", "GLOG_minloglevel": "2", "MC_LOG_LEVEL": "ERROR"}
TCP = {**QUIET, "UCX_TLS": "tcp"}
PEERS = {
    "NIXL": PeerKind(system="nixl", env=QUIET),
    "NIXL, tuned": PeerKind(system="nixl", env=QUIET, tuned=True),
    "NIXL over tcp": PeerKind(system="nixl", env=TCP),
    "NIXL over tcp, tuned": PeerKind(system="nixl", env=TCP, tuned=True),
    "Mooncake": PeerKind(system="mooncake", env=QUIET),
}
BOUNDS = {"shm": "memcpy", "tcp": "raw"}
COMPARED = (  # ours, another, and how many times as fast ours should be; None: shown only
    ("shm", "NIXL", 2.0),
    ("shm", "NIXL, tuned", None),
    ("shm", "Mooncake", 3.0),
    ("tcp", "NIXL over tcp", 1.5),
    ("tcp", "NIXL over tcp, tuned", None),
    ("tcp", "Mooncake", 3.0),
    ("mooncake", "Mooncake", None),
)
SYSTEMS = (*PLANES, *PEERS)


def aim_of_bound(plane: str, cell: Cell) -> float | None:
    """The share of its bound that a plane should reach."""
    if cell.tables == "contiguous":
        return 0.85
    return 0.6 if plane == "shm" and cell.block_size >= 128 else None


Times = dict[str, list[float]]  # seconds of each side's turns


def check(name: str, side: Side, cell: Cell, holder: Holder) -> float:
    """Moves the cell once, with no byte of it there before; the seconds it took."""
    if side.dest is None:
        return side.copy()
    runs = flat(cell.runs, holder.starts, side.dest_starts)
    erase(side.dest, runs)
    taken = side.copy()
    wrong = first_wrong(holder.region, side.dest, runs)
    if wrong is not None:
        raise SystemExit(f"error: {name} brought wrong bytes in run {wrong} of {len(cell.runs)}")
    return taken


def take_turns(sides: Mapping[str, Side], taken: Mapping[str, float]) -> Times:
    """`taken`: seconds of each side before; none take no turns."""
    times: Times = {name: [] for name in sides}
    round_s = sum(taken[name] for name in sides)
    for _ in range(min(MAX_TURNS, max(MIN_TURNS, int(CELL_S / round_s))) if sides else 0):
        for name, side in sides.items():
            times[name].append(side.copy())
    return times


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Turns of our planes with their bounds, and with the peers: a peer leaves no cache as it was for who is next."""

    with_bounds: Times
    with_peers: Times


def measure(cell: Cell, sides: Mapping[str, Side], holder: Holder) -> Measured:
    for side in sides.values():
        side.prepare(cell)
    taken = {name: check(name, side, cell, holder) for name, side in sides.items()}
    alone = {name: side for name, side in sides.items() if name not in PEERS}
    compared = {name: side for name, side in sides.items() if name not in BOUNDS.values()}
    return Measured(
        with_bounds=take_turns(alone, taken),
        with_peers=take_turns(compared if len(alone) < len(sides) else {}, taken),
    )


def ratio(times: Times, ours: str, other: str) -> float:
    return round(statistics.median(b / a for a, b in zip(times[ours], times[other], strict=True)), 3)


def rate(times: Times, name: str, cell: Cell) -> float:
    """GB/s."""
    return cell.runs.num_bytes / statistics.median(times[name]) / 1e9


def bars_of(model: str, cell: Cell, measured: Measured) -> list[Bar]:
    where = f"{model}, {cell.num_tokens} tokens, block {cell.block_size}, {cell.tables}"
    pairs = [(measured.with_bounds, plane, bound, aim_of_bound(plane, cell)) for plane, bound in BOUNDS.items()]
    pairs += [(measured.with_peers, *compared) for compared in COMPARED]
    return [
        Bar(
            name=f"{ours} / {other}, {where}",
            value=ratio(times, ours, other),
            aim=aim,
            note=f"{rate(times, ours, cell):.2f} of {rate(times, other, cell):.2f} GB/s, "
            f"{1e3 * statistics.median(times[ours]):.2f} ms, {len(cell.runs)} runs",
        )
        for times, ours, other, aim in pairs
        if ours in times and other in times
    ]


def figures_of(model: str, cell: Cell, measured: Measured) -> dict[str, object]:
    """Of one cell, for machines to read."""
    return {
        "model": model,
        "tokens": cell.num_tokens,
        "block_size": cell.block_size,
        "tables": cell.tables,
        "runs": len(cell.runs),
        "bytes": cell.runs.num_bytes,
        "gb_per_s": {name: round(rate(measured.with_bounds, name, cell), 3) for name in measured.with_bounds},
        "gb_per_s_with_peers": {name: round(rate(measured.with_peers, name, cell), 3) for name in measured.with_peers},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is measured. `peer_python` None: no peers."""

    models: Sequence[str]
    prompts: Sequence[int]
    block_sizes: Sequence[int]
    systems: Sequence[str]
    peer_python: str | None


@dataclass(slots=True)
class Findings:
    bars: list[Bar] = field(default_factory=list)
    cells: list[dict[str, object]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def make_sides(choice: Choice, holder: Holder, cache: Cache, max_bytes: int, stack: ExitStack) -> dict[str, Side]:
    """A bound stands before its plane, so that both find the machine in the same state."""
    sides: dict[str, Side] = {}
    raw = stack.enter_context(closing(RawStream(holder.hello.raw, max_bytes)))  # the holder lives as long as this
    for name, endpoint in holder.hello.endpoints.items():
        if name == "shm":
            sides["memcpy"] = stack.enter_context(closing(Memcpy(max_bytes)))
        elif name == "tcp":
            sides["raw"] = raw
        reader = make_plane(name, host="127.0.0.1").connect(endpoint, TOKEN, cache.buffers)
        sides[name] = stack.enter_context(closing(Ours(reader, cache)))
    if choice.peer_python is not None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wanted = {name: kind for name, kind in PEERS.items() if name in choice.systems}
        memory = {
            tuned: stack.enter_context(closing(PeerMemory(holder, tuned=tuned)))
            for tuned in sorted({kind.tuned for kind in wanted.values()})
        }
        for name, kind in wanted.items():
            peer = Peer(choice.peer_python, kind.system, kind.env, memory[kind.tuned], folder)
            sides[name] = stack.enter_context(closing(peer))
    return sides


def run_model(choice: Choice, model: str, block_size: int, findings: Findings) -> None:
    """All cells of one layout, with processes of their own."""
    num_tokens = cache_tokens(max(choice.prompts), block_size)
    shape = layout(MODELS[model], block_size, num_tokens)
    todo = cells(shape, choice.prompts)
    with ExitStack() as stack:
        planes = [name for name in PLANES if name in choice.systems]
        holder = stack.enter_context(closing(Holder(model, block_size, num_tokens, planes)))
        cache = stack.enter_context(closing(Cache(shape)))
        sides = make_sides(choice, holder, cache, max(cell.runs.num_bytes for cell in todo), stack)
        findings.refused |= holder.hello.refused
        findings.versions |= {name: side.version for name, side in sides.items() if isinstance(side, Peer)}
        gc.disable()
        for cell in todo:
            measured = measure(cell, sides, holder)
            findings.bars += bars_of(model, cell, measured)
            findings.cells.append(figures_of(model, cell, measured))
        gc.enable()


def chosen() -> tuple[Choice, bool]:
    parser = arguments("KV transfer between two processes: our planes beside memcpy, a raw stream, and peers.")
    parser.add_argument("--peer-python", help="a Python with nixl_cu12 and mooncake, to be measured beside ours")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, help="tokens")
    parser.add_argument("--block-sizes", nargs="+", type=int, default=BLOCK_SIZES, help="tokens")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="bounds come with their plane")
    given = parser.parse_args()
    for name, values in (("--prompts", given.prompts), ("--block-sizes", given.block_sizes)):
        if min(values) < 1:
            parser.error(f"{name} must be at least 1, given {min(values)}")
    if given.peer_python is None and set(given.systems) <= set(PEERS):
        parser.error(f"{', '.join(given.systems)} need --peer-python")
    choice = Choice(
        models=given.models,
        prompts=given.prompts,
        block_sizes=given.block_sizes,
        systems=given.systems,
        peer_python=given.peer_python,
    )
    return choice, given.json


def main() -> int:
    choice, as_json = chosen()
    findings = Findings(bars=plan_bars())
    try:
        for model in choice.models:
            for block_size in choice.block_sizes:
                run_model(choice, model, block_size, findings)
    except (OSError, RuntimeError) as error:
        raise SystemExit(f"error: {error}") from error
    details = {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "cells": findings.cells,
        "peers": findings.versions,
        "not measured": findings.refused,
    }
    return publish("KV transfer between two processes", findings.bars, as_json=as_json, details=details)


if __name__ == "__main__":
    sys.exit(main())
