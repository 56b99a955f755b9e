"""What `pd-service explain` shows: where the time of recent requests went, and which hop made one slow."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pd_service.rpc import admin_pb2 as pb

RULE = (
    "guilty: the phase that took longest beyond its median among the recent finished answers, if that is at least a "
    "tenth of the total; decode is compared per token"
)
_PHASES = (
    ("queue", "tokenizing, waiting for engines, failed rounds"),
    ("prefill", "prompt to first token"),
    ("transfer", "first token to KV in the decode engine"),
    ("confirm", "the holder's yes"),
    ("first_decode", "to the second token"),
    ("decode", "to the last token"),
)


def recent_table(explained: pb.ExplainResponse) -> Table:
    """One line for each answer, newest first."""
    table = Table(title=f"Recent requests: {explained.reach}", caption=RULE)
    table.add_column("request", overflow="fold")
    for column in ("age s", "tokens", "TTFT ms", "total ms"):
        table.add_column(column, justify="right")
    table.add_column("outcome")
    table.add_column("guilty hop", overflow="fold")
    for request in explained.requests:
        for answer in request.answers:
            table.add_row(*_recent_row(request, answer))
    return table


def _recent_row(request: pb.ExplainedRequest, answer: pb.ExplainedAnswer) -> list[str]:
    name = request.request_id if len(request.answers) == 1 else f"{request.request_id} #{answer.index}"
    age = f"{time.time() - request.accepted_unix:.0f}"
    tokens = f"{request.prompt_tokens}+{answer.completion_tokens}"
    ttft = f"{answer.ttft_ms:.1f}" if answer.HasField("ttft_ms") else "-"
    retries = f", {answer.retries} retries" if answer.retries else ""
    return [name, age, tokens, ttft, f"{answer.phases.total_ms:.1f}", request.outcome + retries, _guilt(answer)]


def _guilt(answer: pb.ExplainedAnswer) -> str:
    if not answer.HasField("guilty"):
        return "-"
    return f"{answer.guilty.phase} +{answer.guilty.excess_ms:.1f} ms"


def request_view(explained: pb.ExplainResponse) -> RenderableType:
    """One request: its hops and phases, answer by answer."""
    request = explained.requests[0]
    usual = {one.phase: one.median_ms for one in explained.usual}
    head = f"{request.request_id}: {request.outcome}, {request.prompt_tokens} prompt tokens"
    parts: list[RenderableType] = [Text(head, style="bold")]
    if request.error:
        parts.append(Text(request.error, style="red"))
    for answer in request.answers:
        parts += [_hops_table(answer, len(request.answers)), _phases_table(answer, usual)]
    return Group(*parts, Text(RULE, style="dim"))


def _hops_table(answer: pb.ExplainedAnswer, num_answers: int) -> Table:
    table = Table(title=f"answer {answer.index}" if num_answers > 1 else None, title_justify="left")
    for column in ("at ms", "+ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("what", "engine", "details"):
        table.add_column(column, overflow="fold")
    for hop in answer.hops:
        style = "red" if hop.what.endswith("failed") else None
        table.add_row(f"{hop.at_ms:.1f}", f"{hop.ms:.1f}", hop.what, hop.engine_id, hop.detail, style=style)
    return table


def _phases_table(answer: pb.ExplainedAnswer, usual: dict[str, float]) -> Table:
    guilty = answer.guilty.phase if answer.HasField("guilty") else ""
    table = Table(caption=None if guilty else "nothing took much longer than usual")
    table.add_column("phase", no_wrap=True)
    for column in ("ms", "usual"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("what it was", overflow="fold")
    for phase, meaning in _PHASES:
        mark = " ◄ guilty" if phase == guilty else ""
        median = f"{usual[phase]:.1f}" + ("/token" if phase == "decode" else "") if phase in usual else "-"
        ms = f"{getattr(answer.phases, f'{phase}_ms'):.1f}"
        detail = "; ".join([meaning, *_details(answer, phase)])
        table.add_row(phase + mark, ms, median, detail, style="bold red" if mark else None)
    table.add_row("total", f"{answer.phases.total_ms:.1f}", "", f"{answer.retries} retries")
    return table


def _details(answer: pb.ExplainedAnswer, phase: str) -> Iterator[str]:
    phases = answer.phases
    if phase == "prefill":
        yield f"{answer.cached_tokens} tokens cached"
    elif phase == "transfer" and phases.plane:
        wire_ms = phases.wire_ms + phases.hidden_wire_ms
        rate = f" at {phases.kv_bytes / wire_ms / 1e6:.1f} GB/s" if wire_ms else ""
        hidden = f", of it {phases.hidden_wire_ms:.1f} beside the prefill" if phases.hidden_wire_ms else ""
        yield f"{phases.kv_bytes / 1e6:.1f} MB over {phases.plane}, {wire_ms:.1f} ms on the wire{hidden}{rate}"
    elif phase == "decode":
        yield f"{answer.completion_tokens} tokens in all"
