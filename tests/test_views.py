"""What the command line's tables say of a status."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from pd_service import views
from pd_service.rpc import admin_pb2, engine_pb2


def shown(status: admin_pb2.StatusResponse) -> list[list[str]]:
    """The rows of the table of work on a terminal of 80 columns, cell by cell."""
    console = Console(file=StringIO(), width=80)
    console.print(views.work_table(status))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "/" in line and "│" in line]


def member(engine_id: str, **done: int) -> admin_pb2.EngineMemberStatus:
    status = engine_pb2.EngineStatus(**done)  # type: ignore[arg-type]
    return admin_pb2.EngineMemberStatus(member=admin_pb2.Member(engine_id=engine_id), status=status)


def test_work_names_where_tokens_came_from_and_what_guesses_were_worth() -> None:
    busy = {"computed_tokens": 1234567, "cached_tokens": 89, "received_tokens": 4321, "preemptions": 3}
    status = admin_pb2.StatusResponse(
        engines=[
            member("decode/1", drafted_tokens=60, accepted_tokens=31, **busy),
            member("prefill/0", **busy),
            admin_pb2.EngineMemberStatus(member=admin_pb2.Member(engine_id="decode/2"), problem="does not answer"),
        ]
    )
    assert shown(status) == [
        ["decode/1", "1,234,567", "89", "4,321", "31/60", "3"],
        ["prefill/0", "1,234,567", "89", "4,321", "-", "3"],
    ]


def test_transfers_name_how_leases_ended_and_why_pulls_failed() -> None:
    done = member("decode/1", pulls_confirmed=12, pull_bytes=3_400_000, lease_refusals=2, digests_same=5)
    done.status.leases_ended.update({"confirmed": 7, "expired": 1})
    done.status.pull_failures.update({"peer_lost": 2, "digest": 1, "timeout": 0})
    console = Console(file=StringIO(), width=100)
    console.print(views.transfers_table(admin_pb2.StatusResponse(engines=[done])))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    (row,) = [line for line in text.splitlines() if "decode/1" in line]
    cells = [cell.strip() for cell in row.split("│")[1:-1]]
    assert cells == ["decode/1", "12", "3.4", "7/0/1", "2", "5/0", "1 digest, 2 peer_lost"]


def test_pairs_of_engines_say_plane_and_speed_or_every_reason_why_not() -> None:
    good = engine_pb2.PeerReport(plane="shm", plane_reason="memory: not [this] process", buffers=60)
    good.round_trip_ms, good.bytes_per_second = 0.412, 7.26e9
    bad = engine_pb2.PeerReport(problem="p refuses this reader: layer 0 k_cache: dim differs: 64 and 128")
    pairs = [
        admin_pb2.CheckedPair(prefill="prefill/1", decode="decode/1", report=good),
        admin_pb2.CheckedPair(prefill="prefill/1", decode="decode/2", report=bad),
    ]
    console = Console(file=StringIO(), width=160)
    console.print(views.peers_table(admin_pb2.CheckPeersResponse(pairs=pairs)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in (
        "shm",
        "0.41 ms",
        "7.3",
        "ok 60 buffers alike; memory: not [this] process",
        "dim differs: 64 and 128",
    ):
        assert words in text
