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
