"""What the command line shows: messages in, tables out. All fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from pd_service.rpc import admin_pb2, engine_pb2, generation_pb2

if TYPE_CHECKING:
    from pd_service.doctor import Architecture, Finding
    from pd_service.engine.memory_plan import GroupPlan, PoolPlan

GIB = 2**30


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


class AnswersInTurn:
    """Lets the answers of one request pass one after another: the first as it comes, what comes of the others meanwhile
    when it is their turn."""

    def __init__(self) -> None:
        self._turn = 0
        self._waiting: dict[int, list[generation_pb2.Delta | generation_pb2.Finish]] = {}

    def take(self, response: generation_pb2.GenerateResponse) -> Iterator[generation_pb2.Delta | generation_pb2.Finish]:
        """What can be shown now; each answer ends with its Finish."""
        part = response.finish if response.HasField("finish") else response.delta
        self._waiting.setdefault(part.index, []).append(part)
        while parts := self._waiting.pop(self._turn, []):
            yield from parts
            self._turn += isinstance(parts[-1], generation_pb2.Finish)


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
        ("prefill", phases.prefill_ms, f"prompt to first token, {finish.cached_tokens} tokens cached"),
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
    life = f", life {status.controller_life} of the controller" if status.controller_life > 1 else ""
    title = f"{status.model}, membership {status.membership_version}{life}"
    table = _table(title, "pool", "ready", "asked", "replaced")
    table.add_column("waits for, last failure", overflow="fold")
    for pool in status.pools:
        notes = "\n".join(filter(None, (pool.waits_for, pool.last_failure)))
        table.add_row(pool.role, str(pool.ready), str(pool.desired), str(pool.replaced), notes)
    return table


def engines_table(status: admin_pb2.StatusResponse, rates: Mapping[str, float] | None = None) -> Table:
    """`rates`: tokens computed per second, by engine; if given they stand in the place of pulls."""
    table = Table()
    table.add_column("engine", no_wrap=True)
    for column in ("state", "run", "wait", "KV blocks", "leases", "pulls" if rates is None else "tokens/s"):
        table.add_column(column, overflow="fold")
    for engine in status.engines:
        table.add_row(*_engine_row(engine, rates))
    return table


def _engine_row(engine: admin_pb2.EngineMemberStatus, rates: Mapping[str, float] | None) -> list[str]:
    member, status = engine.member, engine.status
    if engine.problem:
        return [f"{member.engine_id}\n{member.address}".rstrip(), engine.problem]
    name = f"{member.engine_id}\n{member.address}\n{status.pid} on {member.host}\n{member.incarnation}"
    state = f"{member.state}\n{member.held} left" if member.state == "draining" else member.state
    used = "\n".join(f"{usage.used}/{usage.total}" for usage in status.blocks)  # a line for each attention type
    last = str(status.pulls) if rates is None else f"{rates.get(member.engine_id, 0):.1f}"
    return [name, state, str(status.load.running), str(status.load.waiting), used, str(status.leases), last]


def work_table(status: admin_pb2.StatusResponse) -> Table:
    """What each engine has done since its start: where the KV of tokens came from, and what guesses were worth."""
    table = Table(caption="tokens since the engine's start; guesses are those of speculative decoding")
    table.add_column("engine", no_wrap=True)
    for column in ("computed", "from cache", "received", "guesses right", "preempted"):
        table.add_column(column, justify="right")
    for engine in status.engines:
        if not engine.problem:
            table.add_row(*_work_row(engine))
    return table


def _work_row(engine: admin_pb2.EngineMemberStatus) -> list[str]:
    done = engine.status
    guesses = f"{done.accepted_tokens}/{done.drafted_tokens}" if done.drafted_tokens else "-"
    numbers = (done.computed_tokens, done.cached_tokens, done.received_tokens)
    return [engine.member.engine_id, *(f"{number:,}" for number in numbers), guesses, str(done.preemptions)]


def transfers_table(status: admin_pb2.StatusResponse) -> Table:
    """What each engine has pulled from others and held for them since its start."""
    table = Table(caption="leases: confirmed/released/expired; digests: pieces compared with the holder's, alike/not")
    table.add_column("engine", no_wrap=True)
    for column in ("pulls", "MB", "leases", "refused", "digests"):
        table.add_column(column, justify="right")
    table.add_column("pulls failed", overflow="fold")
    for engine in status.engines:
        if not engine.problem:
            table.add_row(*_transfers_row(engine))
    return table


def _transfers_row(engine: admin_pb2.EngineMemberStatus) -> list[str]:
    done = engine.status
    leases = "/".join(str(done.leases_ended[how]) for how in ("confirmed", "released", "expired"))
    digests = f"{done.digests_same:,}/{done.digests_different:,}"
    failed = ", ".join(f"{number} {reason}" for reason, number in sorted(done.pull_failures.items()) if number)
    numbers = (
        f"{done.pulls_confirmed:,}",
        f"{done.pull_bytes / 1e6:,.1f}",
        leases,
        f"{done.lease_refusals:,}",
        digests,
    )
    return [engine.member.engine_id, *numbers, failed or "-"]


def findings_table(findings: Sequence[Finding]) -> Table:
    table = _table("pd-service doctor", "check", "", "finding")
    for finding in findings:
        table.add_row(finding.check, "[green]ok[/green]" if finding.is_ok else "[red]problem[/red]", finding.text)
    return table


def peers_table(checked: admin_pb2.CheckPeersResponse) -> Table:
    """Every pair of engines: whether the one can read from the other, how, and how fast."""
    table = _table("Pairs of engines", "prefill", "decode")
    table.add_column("plane", no_wrap=True)
    for column in ("round trip", "GB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("finding", overflow="fold")
    for pair in checked.pairs:
        table.add_row(pair.prefill, pair.decode, *_peer_row(pair.report))
    table.caption = "GB/s: of the plane, one block at a time of those that hold no data; neighbouring blocks go faster"
    return table


def _peer_row(report: engine_pb2.PeerReport) -> list[str]:
    if report.problem:
        return [report.plane or "-", "-", "-", f"[red]problem[/red] {escape(report.problem)}"]
    rate = f"{report.bytes_per_second / 1e9:.1f}"
    finding = f"[green]ok[/green] {report.buffers} buffers alike; {escape(report.plane_reason)}"
    return [report.plane, f"{report.round_trip_ms:.2f} ms", rate, finding]


def memory_table(pools: Sequence[PoolPlan], available_bytes: int) -> Table:
    """What one engine of each pool holds, and what is left of the host when all of them run here."""
    table = _table("Memory", "GiB for each engine", *(f"{pool.replicas} x {pool.role}" for pool in pools))
    plans = [pool.plan for pool in pools]
    table.add_row("weights, packed", *(_gib(plan.weight_bytes) for plan in plans))
    table.add_row("KV cache", *(_gib(plan.kv_bytes) for plan in plans))
    table.add_row("largest step, about", *(_gib(plan.step_bytes) for plan in plans))
    table.add_row("while loading, for a moment", *(_gib(plan.loading_bytes) for plan in plans))
    table.add_row("most at once", *(_gib(plan.total_bytes) for plan in plans))
    table.add_section()
    for i in range(len(plans[0].groups)):
        groups = [plan.groups[i] for plan in plans]
        table.add_row(f"{groups[0].key}: bytes for a token", *(str(group.bytes_per_token) for group in groups))
        table.add_row(f"blocks of {plans[0].block_size} tokens", *(_blocks(group) for group in groups))
    table.add_section()
    table.add_row("tokens that fit", *(str(plan.num_tokens) if plan.num_tokens else "any number" for plan in plans))
    longest = plans[0].max_model_len
    table.add_row(f"requests of {longest} tokens", *(str(plan.num_longest_requests) for plan in plans))
    needed = sum(pool.replicas * pool.plan.total_bytes for pool in pools)
    table.caption = f"free {_gib(available_bytes)} GiB, of which {_gib(available_bytes - needed)} remain"
    return table


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}"


def _blocks(group: GroupPlan) -> str:
    window = "" if group.window is None else f", window {group.window}"
    return f"{group.num_blocks}, {group.blocks_per_request} a request{window}"


def architectures_table(architectures: Sequence[Architecture]) -> Table:
    table = _table("Models that can be served")
    table.add_column("family, architecture", no_wrap=True)
    for column in ("attention", "examples"):
        table.add_column(column, overflow="fold")
    for one in architectures:
        drafts = "\ndraft layer (MTP)" if one.has_drafts else ""
        table.add_row(f"[bold]{one.family}[/bold]\n{one.name}", one.attention + drafts, "\n".join(one.examples))
        table.add_section()
    table.caption = "n-gram drafts work with every model, a draft layer with checkpoints that have one"
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
