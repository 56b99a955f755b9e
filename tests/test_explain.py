"""What is remembered of requests, which phase is called guilty, and what an operator is shown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from io import StringIO
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from pd_service import explain_view
from pd_service.errors import EngineLost
from pd_service.gateway.accounting import Progress
from pd_service.gateway.admin_door import AdminServicer
from pd_service.gateway.generation import Generation
from pd_service.gateway.intake import ClientRequest, TokenPrompt
from pd_service.gateway.phases import Phases
from pd_service.gateway.recent import RecentAnswer, RecentRequests
from pd_service.gateway.timeline import MAX_HOPS, Timeline
from pd_service.gateway.usual import PHASES, guilty_hop, usual_ms
from pd_service.request import SamplingParams
from pd_service.rpc import admin_pb2 as pb
from pd_service.rpc import admin_pb2_grpc
from tests.gateway_fakes import FakeStory, byte_level_tokenizer, collect, end, make_generation, tokens
from tests.local_cluster import new_job
from tests.one_loop import run_async


def answer(num_tokens: int = 10, **phase_ms: float) -> RecentAnswer:
    phases = Phases(mark=0.0, total_ms=sum(phase_ms.values()), **{f"{name}_ms": ms for name, ms in phase_ms.items()})  # type: ignore[arg-type]
    return RecentAnswer(index=0, phases=phases, timeline=Timeline(num_tokens=num_tokens))


USUAL = [answer(queue=1.0, prefill=20.0, transfer=ms, confirm=0.5, first_decode=5.0, decode=40.0) for ms in (4, 5, 60)]


# ---- the guilty hop


def test_the_phase_furthest_beyond_its_median_is_guilty() -> None:
    slow = answer(queue=1.0, prefill=50.0, transfer=95.0, confirm=0.5, first_decode=5.0, decode=40.0)
    guilt = guilty_hop(slow, usual_ms(USUAL))
    assert guilt is not None
    assert (guilt.phase, guilt.usual_ms, guilt.excess_ms) == ("transfer", 5.0, 90.0)


def test_decode_is_compared_per_token() -> None:
    usual = usual_ms(USUAL)
    assert usual["decode"] == 5.0  # 8 tokens after the second
    assert guilty_hop(answer(102, prefill=20.0, decode=500.0), usual) is None
    guilt = guilty_hop(answer(102, prefill=20.0, decode=900.0), usual)
    assert guilt is not None
    assert (guilt.phase, guilt.usual_ms, guilt.excess_ms) == ("decode", 500.0, 400.0)


def test_nothing_is_guilty_where_nothing_is_known_or_little_was_lost() -> None:
    assert guilty_hop(USUAL[0], usual_ms([])) is None
    assert guilty_hop(USUAL[0], usual_ms([USUAL[0]])) is None
    assert guilty_hop(answer(queue=8.0, prefill=20.0, transfer=5.0, decode=45.0), usual_ms(USUAL)) is None


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(PHASES, st.floats(0, 1e5))), min_size=1), st.integers(0, 50))
def test_an_answer_is_never_guilty_of_more_than_it_took(lives: list[dict[str, float]], num_tokens: int) -> None:
    answers = [answer(num_tokens, **life) for life in lives]
    usual = usual_ms(answers)
    for one in answers:
        guilt = guilty_hop(one, usual)
        if guilt is not None:
            assert 0 < guilt.excess_ms <= one.phases.total_ms
            assert guilt.usual_ms + guilt.excess_ms == pytest.approx(getattr(one.phases, f"{guilt.phase}_ms"))


# ---- the memory


async def remember(recent: RecentRequests, name: str, error: Exception | None = None) -> None:
    job = new_job([1, 2, 3], 4)
    object.__setattr__(job, "request_id", name)
    with suppress(EngineLost), recent.following([job], Progress(0.0, None, 0, is_accepted=error is None)):
        if error:
            raise error


def test_the_ring_keeps_the_last_that_ended_and_says_how_far_back_it_goes() -> None:
    async def scenario() -> None:
        recent = RecentRequests(3)
        assert recent.reach() == "no request has ended yet"
        for number in range(5):
            await remember(recent, f"r{number}")
        assert [one.request_id for one in recent.newest_first()] == ["r4", "r3", "r2"]
        assert recent.find("r1") is None
        assert recent.reach().startswith("the last 3 of at most 3, back to")

    run_async(scenario())


def test_of_an_id_used_twice_the_later_request_is_found() -> None:
    async def scenario() -> None:
        recent = RecentRequests(3)
        await remember(recent, "r")
        await asyncio.sleep(0.001)  # the loop's clock has moved on
        await remember(recent, "r", EngineLost("decode/1 was lost"))
        found = recent.find("r")
        assert found is not None
        assert found.error == "EngineLost: decode/1 was lost"

    run_async(scenario())


def test_a_request_that_fails_for_ever_has_a_bounded_timeline() -> None:
    timeline = Timeline()
    for number in range(3 * MAX_HOPS):
        timeline.note(float(number), "round failed")
    assert len(timeline.hops) == MAX_HOPS
    assert timeline.hops[-1].at == 3 * MAX_HOPS - 1


# ---- what an operator gets


class NotingStory(FakeStory):
    """Writes down what a story of two engines and one failure would."""

    async def run(self, job):  # type: ignore[no-untyped-def]
        now = asyncio.get_running_loop().time()
        job.timeline.note(now, "sent to prefill", "prefill/1")
        job.timeline.note(now, "round failed", "prefill/1", "EngineLost: gone")
        async for event in super().run(job):
            job.phases.wire_ms, job.phases.kv_bytes = 2.0, 4_000_000
            yield event


@asynccontextmanager
async def explaining(recent: RecentRequests) -> AsyncIterator[admin_pb2_grpc.AdminStub]:
    """A gateway's operator door over gRPC."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(channel, recent, list), server)
        await server.start()
        yield admin_pb2_grpc.AdminStub(channel)
        await server.stop(None)


def request(name: str, n: int = 1) -> ClientRequest:
    return ClientRequest(
        prompt=TokenPrompt((5, 6)), sampling=SamplingParams(temperature=1.0), request_id=name, n=n
    )  # fmt: skip


def shown(what: RenderableType, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def generation_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


def new_generation(directory: Path, story: FakeStory, recent: RecentRequests) -> Generation:
    generation = make_generation(byte_level_tokenizer(directory), story)
    return Generation(intake=generation.intake, story=story, metrics=generation.metrics, recent=recent)


def test_a_finished_request_is_explained_with_hops_phases_and_engines(generation_parts: Path) -> None:
    async def scenario() -> None:
        recent = RecentRequests(4)
        generation = new_generation(generation_parts, NotingStory(tokens(5), tokens(6), end()), recent)
        await collect(generation, request("mine", n=2))
        async with explaining(recent) as admin:
            explained = await admin.Explain(pb.ExplainRequest(request_id="mine"))
        (one,) = explained.requests
        assert (one.outcome, one.prompt_tokens, len(one.answers)) == ("finished", 2, 2)
        first = one.answers[0]
        assert [(hop.what, hop.engine_id) for hop in first.hops] == [
            ("sent to prefill", "prefill/1"),
            ("round failed", "prefill/1"),
            ("finished", ""),
        ]
        assert all(hop.ms >= 0 for hop in first.hops)
        assert sum(hop.ms for hop in first.hops) == pytest.approx(first.hops[-1].at_ms)
        assert (first.completion_tokens, first.phases.plane) == (2, "shm")
        assert 0 < first.ttft_ms <= first.hops[-1].at_ms
        text = shown(explain_view.request_view(explained), 200)
        words = ["mine: finished", "answer 1", "sent to prefill", "prefill/1", "EngineLost: gone", "guilty"]
        for word in (*words, "4.0 MB over shm", "2.0 GB/s"):
            assert word in text

    run_async(scenario())


def test_recent_requests_are_listed_newest_first_without_hops(generation_parts: Path) -> None:
    async def scenario() -> None:
        recent = RecentRequests(4)
        generation = new_generation(generation_parts, NotingStory(tokens(5), end()), recent)
        for name in ("a", "b", "c"):
            await collect(generation, request(name))
        async with explaining(recent) as admin:
            explained = await admin.Explain(pb.ExplainRequest(limit=2))
        assert [one.request_id for one in explained.requests] == ["c", "b"]
        assert not any(one.answers[0].hops for one in explained.requests)
        text = shown(explain_view.recent_table(explained), 80)
        assert "2+1" in text
        assert "…" not in text

    run_async(scenario())


def test_a_live_request_can_be_explained(generation_parts: Path) -> None:
    async def scenario() -> None:
        recent, gate = RecentRequests(4), asyncio.Event()
        story = NotingStory(tokens(5), gate, end())
        generation = new_generation(generation_parts, story, recent)
        asking = asyncio.create_task(collect(generation, request("stuck")))
        await story.started.get()
        async with explaining(recent) as admin:
            explained = await admin.Explain(pb.ExplainRequest(request_id="stuck"))
            assert explained.requests[0].outcome == "live"
            assert "stuck: live" in shown(explain_view.request_view(explained))
        gate.set()
        await asking

    run_async(scenario())


def test_an_unknown_request_is_refused_with_how_far_back_the_memory_goes(generation_parts: Path) -> None:
    async def scenario() -> None:
        recent = RecentRequests(4)
        await collect(new_generation(generation_parts, FakeStory(tokens(5), end()), recent), request("a"))
        async with explaining(recent) as admin:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await admin.Explain(pb.ExplainRequest(request_id="b"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        assert "no request 'b' is known; this gateway knows the last 1 of at most 4" in str(refused.value.details())

    run_async(scenario())
