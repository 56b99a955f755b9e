"""What the command line shows: messages in, tables out. All fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from pd_service.rpc import admin_pb2, generation_pb2

if TYPE_CHECKING:
    from pd_service.doctor import Finding


def choices_table(status: admin_pb2.StatusResponse) -> Table:
    """Every engine with what was chosen for it and why."""
    table = _table(f"{status.model} is served", "engine", "what", "chosen", "because")
    for engine in status.engines:
        name = engine.member.engine_id
        for choice in engine.status.choices:
            table.add_row(name, choice.what, choice.chosen, choice.reason)
            name = ""  # said once
        table.add_section()
    return table


def phases_table(finish: generation_pb2.Finish) -> Table:
    """Where the time of one answer went."""
    phases = finish.phases
    table = _table(f"{finish.reason}: {finish.prompt_tokens} prompt tokens, {finish.completion_tokens} generated")
    table.add_column("phase")
    table.add_column("ms", justify="right")
    table.add_column("what it was")
    wire = f"of it {phases.wire_ms:.1f} ms moving {phases.kv_bytes / 1e6:.1f} MB over {phases.plane}"
    rows = (
        ("queue", phases.queue_ms, "tokenizing, waiting for the prefill engine"),
        ("prefill", phases.prefill_ms, "prompt to first token"),
        ("transfer", phases.transfer_ms, wire if phases.plane else "no hand-over was needed"),
        ("confirm", phases.confirm_ms, "the holder's yes"),
        ("first decode step", phases.first_decode_ms, "to the second token"),
        ("decode", phases.decode_ms, "to the last token"),
        ("total", phases.total_ms, f"{finish.retries} retries"),
    )
    for name, value, meaning in rows:
        table.add_row(name, f"{value:.1f}", meaning)
    if phases.total_ms:
        table.caption = f"{finish.completion_tokens / phases.total_ms * 1e3:.1f} tokens/s"
    return table


def pools_table(status: admin_pb2.StatusResponse) -> Table:
    table = _table(f"{status.model}, membership {status.membership_version}", "pool", "ready", "asked", "replaced")
    table.add_column("last failure", overflow="fold")
    for pool in status.pools:
        table.add_row(pool.role, str(pool.ready), str(pool.desired), str(pool.replaced), pool.last_failure)
    return table


def engines_table(status: admin_pb2.StatusResponse) -> Table:
    table = Table()
    table.add_column("engine", no_wrap=True)
    for column in ("state", "pid", "run", "wait", "KV blocks", "leases", "pulls"):
        table.add_column(column)
    for engine in status.engines:
        table.add_row(*_engine_row(engine))
    return table


def _engine_row(engine: admin_pb2.EngineMemberStatus) -> list[str]:
    member, status = engine.member, engine.status
    name = f"{member.engine_id}\n{member.address}".rstrip()
    if engine.problem:
        return [name, engine.problem]
    used = "\n".join(f"{usage.used}/{usage.total}" for usage in status.blocks)  # a line for each attention type
    load = status.load
    return [name, member.state, *map(str, (status.pid, load.running, load.waiting, used, status.leases, status.pulls))]


def findings_table(findings: Sequence[Finding]) -> Table:
    table = _table("pd-service doctor", "check", "", "finding")
    for finding in findings:
        table.add_row(finding.check, "[green]ok[/green]" if finding.is_ok else "[red]problem[/red]", finding.text)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
