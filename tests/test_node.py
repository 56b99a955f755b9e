"""Real engines over real gRPC in one process: hand-over, cancel, loss, restart, refusal."""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import grpc
import pytest

from pd_service.channels import EOF, end
from pd_service.config import PROTOCOL_VERSION, EngineConfig, EngineSettings, GatewaySettings, RetrySettings
from pd_service.engine.request_state import token_digest
from pd_service.errors import DeadlineExceeded, InvalidRequest, TransferFailed, Unavailable
from pd_service.gateway.engines import EngineClient
from pd_service.models.config import fingerprint
from pd_service.node.node import EngineNode
from pd_service.request import EngineRequest, EngineSampling, FinishReason, RequestId, Ticket, TokenEvent
from pd_service.rpc import engine_pb2, engine_pb2_grpc, kv_transfer_pb2, kv_transfer_pb2_grpc
from tests.leftovers import Held, held_by_this_process, table_sizes
from tests.local_cluster import LocalCluster, eventually, local_cluster, new_job, run
from tests.one_loop import run_async

PROMPT = list(range(3, 40))


def prompts() -> list[list[int]]:
    """Lengths around the block size of 16, and longer than a step's token budget."""
    draw = random.Random(0)
    return [[draw.randrange(3, 500) for _ in range(length)] for length in (1, 2, 15, 16, 17, 32, 33, 100, 300)]


async def decodes_run(cluster: LocalCluster) -> bool:
    return sum(client.load.running for client in cluster.directory.ready("decode")) > 1


async def whole(model_dir: Path, jobs: list[tuple[list[int], int, EngineSampling]]) -> list[list[int]]:
    """What one engine alone, doing both phases, answers."""
    gateway = GatewaySettings(local_prefill_max_tokens=10_000)
    async with local_cluster(model_dir, prefill=0, decode=0, mixed=1, gateway=gateway) as cluster:
        return [await cluster.generate(prompt, count, sampling) for prompt, count, sampling in jobs]


@pytest.mark.parametrize("plane", ["memory", "shm", "tcp"])
def test_split_equals_whole(tiny_model_dir: Path, plane: str) -> None:
    seeded = EngineSampling(temperature=1.0, top_p=0.9, seed=7)
    jobs = [(prompt, 12, sampling) for prompt in prompts() for sampling in (EngineSampling(), seeded)]

    async def scenario() -> None:
        expected = await whole(tiny_model_dir, jobs)
        settings = EngineSettings(planes=(plane,), max_num_batched_tokens=64)  # type: ignore[arg-type]
        async with local_cluster(tiny_model_dir, settings=settings) as cluster:
            one_by_one = [await cluster.generate(*job) for job in jobs]
            at_once = await asyncio.gather(*(cluster.generate(*job) for job in jobs))
        assert one_by_one == expected
        assert list(at_once) == expected

    run_async(scenario())


def test_exactly_the_prompts_positions_are_handed_over_and_computed_once(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, settings=EngineSettings(prefix_cache=False)) as cluster:
            for length in (16, 17):
                job = new_job(PROMPT[:length], 5)
                await run(cluster.story, job)
                assert job.phases.plane == "memory"
                assert job.phases.kv_bytes == length * 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, dim, float32
            prefill, decode = [await cluster.status(name) for name in cluster.nodes]
            assert (prefill.computed_tokens, prefill.received_tokens) == (33, 0)
            assert (decode.computed_tokens, decode.received_tokens) == (2 * 4, 33)

    run_async(scenario())


def test_what_both_engines_have_cached_is_neither_computed_nor_moved_again(tiny_model_dir: Path) -> None:
    prompts = [PROMPT, PROMPT, [*PROMPT[:32], 7, 7, 7], [9, *PROMPT[1:]], PROMPT[:32]]
    num_cached = [0, 32, 32, 0, 16]  # full blocks of 16, and one token at least is computed on the prefill engine
    num_moved = [37, 5, 3, 37, 0]

    async def outputs(*, prefix_cache: bool) -> tuple[list[list[int]], list[int], list[int]]:
        async with local_cluster(tiny_model_dir, settings=EngineSettings(prefix_cache=prefix_cache)) as cluster:
            tokens, computed, received = [], [0], [0]
            for prompt in prompts:
                tokens.append(await cluster.generate(prompt, 6))
                computed.append((await cluster.status("prefill/0")).computed_tokens)
                received.append((await cluster.status("decode/1")).received_tokens)
            return tokens, _differences(computed), _differences(received)

    async def scenario() -> None:
        plain, computed, received = await outputs(prefix_cache=False)
        assert computed == received == [len(prompt) for prompt in prompts]
        cached, computed, received = await outputs(prefix_cache=True)
        assert cached == plain
        assert computed == [len(p) - c for p, c in zip(prompts, num_cached, strict=True)]
        assert received == num_moved

    run_async(scenario())


def _differences(totals: list[int]) -> list[int]:
    return [after - before for before, after in pairwise(totals)]


def test_one_token_never_touches_a_decode_engine(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, decode=0) as cluster:
            assert len(await cluster.generate(PROMPT, 1)) == 1

    run_async(scenario())


def test_a_stop_token_as_first_token_ends_the_answer(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            (first,) = await cluster.generate(PROMPT, 1)
            sampling = EngineSampling(stop_token_ids=frozenset({first}))
            tokens, _, end = await run(cluster.story, new_job(PROMPT, 8, sampling))
            assert tokens == []
            assert end.finish is FinishReason.STOP
            assert (await cluster.status("decode/1")).steps == 0

    run_async(scenario())


def test_logprobs_have_one_entry_per_token_equal_to_one_engines(tiny_model_dir: Path) -> None:
    sampling = EngineSampling(logprobs=3)

    async def scenario() -> None:
        gateway = GatewaySettings(local_prefill_max_tokens=10_000)
        async with local_cluster(tiny_model_dir, prefill=0, decode=0, mixed=1, gateway=gateway) as cluster:
            tokens, expected, _ = await run(cluster.story, new_job(PROMPT, 6, sampling))
        async with local_cluster(tiny_model_dir) as cluster:
            _, logprobs, _ = await run(cluster.story, new_job(PROMPT, 6, sampling))
        assert len(expected) == len(tokens) == 6
        for ours, theirs, token in zip(logprobs, expected, tokens, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
            assert ours.top[0] == (token, pytest.approx(ours.logprob, abs=1e-6))
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]

    run_async(scenario())


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5])
def test_a_client_that_leaves_frees_everything(tiny_model_dir: Path, num_tokens: int) -> None:
    """After three pool-fulls of them, the pools are as at the start."""

    async def leave_after(cluster: LocalCluster) -> None:
        async with aclosing(cluster.story.run(new_job(PROMPT, 100))) as events:
            for _ in range(num_tokens):
                await anext(events)
            if not num_tokens:
                task = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, kv_cache_bytes=2**19) as cluster:
            blocks = (await cluster.status("prefill/0")).blocks[0].total
            for _ in range(3 * blocks // 3):
                await leave_after(cluster)
            await cluster.wait_until_empty()
            assert len(await cluster.generate(PROMPT, 4)) == 4

    run_async(scenario())


def test_cancel_at_any_instant_leaves_both_engines_serving(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            expected = await cluster.generate(PROMPT, 8)
            loop = asyncio.get_running_loop()
            for instant in range(200):
                task = asyncio.ensure_future(cluster.generate(PROMPT, 8))
                loop.call_later(instant * 1e-4, task.cancel)
                await asyncio.gather(task, return_exceptions=True)
            await cluster.wait_until_empty()
            assert await cluster.generate(PROMPT, 8) == expected

    run_async(scenario())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_stream_goes_on_with_the_right_tokens_when_its_engine_is_lost(tiny_model_dir: Path, role: str) -> None:
    seeded = EngineSampling(temperature=0.8, seed=3)

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, prefill=2, decode=2) as cluster:
            for sampling in (EngineSampling(), seeded):
                expected = await cluster.generate(PROMPT, 60, sampling)
                streams = [asyncio.ensure_future(cluster.generate(PROMPT, 60, sampling)) for _ in range(4)]
                await eventually(lambda: decodes_run(cluster), "two streams are decoded")
                victim = next(name for name in cluster.nodes if name.startswith(role))
                await cluster.remove(victim)
                assert await asyncio.gather(*streams) == [expected] * 4
                await cluster.wait_until_empty()
                await cluster.add(role)  # type: ignore[arg-type]

    run_async(scenario())


def test_an_engine_that_comes_back_at_its_old_address_is_a_new_one(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            expected = await cluster.generate(PROMPT, 6)
            for role in ("prefill", "decode"):
                name = next(name for name in cluster.nodes if name.startswith(role))
                old = cluster.nodes[name]
                port = int(old.address.rpartition(":")[2])
                await cluster.remove(name)
                new_name = f"{role}/again"
                cluster.nodes[new_name] = type(old)(old._config)
                cluster.roles[new_name] = role  # type: ignore[assignment]
                assert await cluster.nodes[new_name].start("127.0.0.1", port) == old.address
                await cluster.publish()
                assert await cluster.generate(PROMPT, 6) == expected

    run_async(scenario())


def test_without_engines_the_story_gives_up_in_bounded_time(tiny_model_dir: Path) -> None:
    gateway = GatewaySettings(retry=RetrySettings(engine_wait_s=0.05))

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, decode=0, gateway=gateway) as cluster:
            with pytest.raises(Unavailable, match="no decode engine"):
                await cluster.generate(PROMPT, 4)

    run_async(scenario())


def test_what_an_engine_can_never_hold_is_refused_by_name(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            with pytest.raises(InvalidRequest, match="512"):
                await cluster.generate(PROMPT, 500)

    run_async(scenario())


def test_a_gateway_that_vanishes_leaves_no_request_and_no_ticket(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            node = cluster.nodes["prefill/0"]
            async with grpc.aio.insecure_channel(node.address) as channel:
                stream = engine_pb2_grpc.EngineStub(channel).Session()
                hello = engine_pb2.GatewayHello(
                    version=PROTOCOL_VERSION, incarnation=node.incarnation, model=fingerprint(tiny_model_dir)
                )
                await stream.write(engine_pb2.GatewayMessage(hello=hello))
                assert (await stream.read()).hello.role == "prefill"
                submit = engine_pb2.Submit(
                    request_id="r", token_ids=PROMPT, num_prompt_tokens=len(PROMPT),
                    max_new_tokens=8, prefill_only=True,
                    sampling=engine_pb2.EngineSampling(top_p=1.0),
                )  # fmt: skip
                await stream.write(engine_pb2.GatewayMessage(submit=submit))
                events = [e for message in [await stream.read()] for e in message.events.events]
                while not events or not events[-1].finish:
                    events += (await stream.read()).events.events
                assert events[-1].finish == "prefilled"
                assert {event.ticket.lease_id for event in events} == {events[0].ticket.lease_id}
                assert (await cluster.status("prefill/0")).leases == 1
            await cluster.wait_until_empty()

    run_async(scenario())


def test_another_incarnation_is_refused_on_both_services(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, decode=0) as cluster:
            address = cluster.nodes["prefill/0"].address
            async with grpc.aio.insecure_channel(address) as channel:
                session = engine_pb2_grpc.EngineStub(channel).Session()
                hello = engine_pb2.GatewayHello(version=PROTOCOL_VERSION, incarnation="another")
                await session.write(engine_pb2.GatewayMessage(hello=hello))
                with pytest.raises(grpc.aio.AioRpcError, match="another"):
                    await session.read()
                reader = kv_transfer_pb2_grpc.KvTransferStub(channel).Channel()
                greeting = kv_transfer_pb2.ReaderHello(version=PROTOCOL_VERSION, holder_incarnation="another")
                await reader.write(kv_transfer_pb2.ReaderMessage(hello=greeting))
                assert "another" in (await reader.read()).refused.reasons[0]

    run_async(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_no_bytes_from_a_peer_end_a_holder(tiny_model_dir: Path, seed: int) -> None:
    """Random bytes as messages, and well-formed ones in the wrong order."""
    draw = random.Random(seed)

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            expected = await cluster.generate(PROMPT, 4)
            node = cluster.nodes["prefill/0"]
            for method in ("/pd.v1.KvTransfer/Channel", "/pd.v1.Engine/Session"):
                for _ in range(40):
                    async with grpc.aio.insecure_channel(node.address) as channel:
                        stream = channel.stream_stream(method)()
                        await stream.write(draw.randbytes(draw.randrange(60)))
                        await stream.done_writing()
                        with contextlib.suppress(grpc.aio.AioRpcError):
                            while await stream.read() is not EOF:
                                pass
                        assert await stream.code() is not grpc.StatusCode.UNAVAILABLE  # the server itself is there
            assert await cluster.generate(PROMPT, 4) == expected

    run_async(scenario())


def test_engines_with_different_caches_refuse_each_other_and_stay_up(tiny_model_dir: Path, tmp_path: Path) -> None:
    gateway = GatewaySettings(retry=RetrySettings(max_failures=0))

    async def scenario() -> None:
        async with (
            local_cluster(tiny_model_dir, decode=0, gateway=gateway) as cluster,
            local_cluster(tiny_model_dir, prefill=0, settings=EngineSettings(block_size=8)) as other,
        ):
            cluster.nodes["decode/other"], cluster.roles["decode/other"] = other.nodes["decode/0"], "decode"
            await cluster.publish()
            await cluster.directory.wait_for("decode", 5)
            with pytest.raises(Unavailable, match=r"block_size.*8.*16|block_size.*16.*8"):
                await cluster.generate(PROMPT, 4)
            assert len(await cluster.generate(PROMPT, 1)) == 1
            del cluster.nodes["decode/other"]

    run_async(scenario())


def test_a_ticket_nobody_holds_fails_the_request_alone(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            holder = cluster.nodes["prefill/0"]
            (engine,) = cluster.directory.ready("decode")
            for address in (holder.address, "127.0.0.1:1"):
                ticket = Ticket(
                    address=address,
                    incarnation=holder.incarnation,
                    lease_id="never",
                    num_tokens=len(PROMPT) - 1,
                    token_digest=token_digest(PROMPT[:-1]),
                )
                request = EngineRequest(
                    request_id=RequestId(f"r{address}"),
                    token_ids=tuple(PROMPT),
                    num_prompt_tokens=len(PROMPT),
                    max_new_tokens=4,
                    sampling=EngineSampling(),
                    ticket=ticket,
                )
                with pytest.raises(TransferFailed):
                    async for _ in engine.run(request, None):
                        pass
            assert len(await cluster.generate(PROMPT, 4)) == 4

    run_async(scenario())


@pytest.mark.parametrize("loss", ["holder dies", "lease ends", "never was"])
def test_a_queued_request_learns_at_once_that_its_ticket_is_lost(long_model_dir: Path, loss: str) -> None:
    """The only seat of its engine is taken for seconds."""

    async def scenario() -> None:
        settings = EngineSettings(max_num_seqs=1)
        async with local_cluster(long_model_dir, settings=settings, kv_cache_bytes=2**24) as cluster:
            (prefill,), (decode,) = cluster.directory.ready("prefill"), cluster.directory.ready("decode")
            head = asyncio.create_task(_events(decode, new_request("head", max_new_tokens=15_000)))
            await eventually(lambda: is_loaded(cluster, running=1), "the head runs")
            held = await _events(prefill, new_request("held", prefill_only=True))
            ticket = held[-1].ticket
            assert ticket is not None
            ticket = replace(ticket, lease_id="never") if loss == "never was" else ticket
            queued = asyncio.create_task(_events(decode, new_request("queued", held[0].token_ids, ticket=ticket)))
            if loss != "never was":
                await eventually(lambda: is_loaded(cluster, running=1, waiting=1), "the other queues")
            if loss == "holder dies":
                await cluster.remove("prefill/0")
            else:
                cluster.nodes["prefill/0"]._holder.release_request(RequestId("held"))
            with pytest.raises(TransferFailed):
                await queued
            assert not head.done()
            status = await cluster.status("decode/1")
            assert sum(status.pull_failures.values()) == 1
            assert status.load.running == 1
            await end(head)

    run_async(scenario())


async def is_loaded(cluster: LocalCluster, *, running: int, waiting: int = 0) -> bool:
    load = (await cluster.status("decode/1")).load
    return (load.running, load.waiting) == (running, waiting)


async def _events(engine: EngineClient, request: EngineRequest) -> list[TokenEvent]:
    async with aclosing(engine.run(request, None)) as events:
        return [event async for event in events]


def new_request(
    name: str,
    output: Sequence[int] = (),
    max_new_tokens: int = 4,
    *,
    prefill_only: bool = False,
    ticket: Ticket | None = None,
) -> EngineRequest:
    return EngineRequest(
        request_id=RequestId(name),
        token_ids=(*PROMPT, *output),
        num_prompt_tokens=len(PROMPT),
        max_new_tokens=max_new_tokens,
        sampling=EngineSampling(),
        prefill_only=prefill_only,
        ticket=ticket,
    )


def test_a_lease_that_ends_unread_frees_its_blocks(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, settings=EngineSettings(lease_s=0.05)) as cluster:
            (engine,) = cluster.directory.ready("prefill")
            request = EngineRequest(
                request_id=RequestId("r"),
                token_ids=tuple(PROMPT),
                num_prompt_tokens=len(PROMPT),
                max_new_tokens=4,
                sampling=EngineSampling(),
                prefill_only=True,
            )
            events = [event async for event in engine.run(request, None)]
            assert events[-1].finish is FinishReason.PREFILLED
            await cluster.wait_until_empty()

    run_async(scenario())


def test_decode_engines_learn_of_their_holders_before_any_request(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            reader = cluster.nodes["decode/1"]._reader

            async def has_met() -> bool:
                return bool(reader.choices())

            await eventually(has_met, "the reader has met the holder")
            (choice,) = [c for c in (await cluster.status("decode/1")).choices if c.what == "data plane"]
            assert choice.chosen == f"memory from {cluster.nodes['prefill/0'].address}"
            assert choice.reason == "first choice"

    run_async(scenario())


def test_a_stopped_engine_leaves_no_descriptor_mapping_or_thread(tiny_model_dir: Path) -> None:
    """Twenty lives of a prefill engine under one decode engine: what the first left behind, the last leaves too."""

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, prefill=0, settings=EngineSettings(planes=("shm", "tcp"))) as cluster:
            held: list[Held] = []
            (reader,) = [node._reader for node in cluster.nodes.values()]

            async def is_over() -> bool:
                return not reader._tasks

            for life in range(20):
                name = await cluster.add("prefill")
                await cluster.generate(PROMPT, 3)
                await cluster.remove(name)
                await eventually(is_over, "the channel to the stopped engine is closed")
                if life in (4, 19):
                    held.append(held_by_this_process())
            first, last = held
            assert first.covers(last)

    run_async(scenario())


def test_the_deadline_ends_a_request_on_the_engine_itself(long_model_dir: Path) -> None:
    """Nobody cancels here: the engine knows the deadline."""

    async def scenario() -> None:
        async with local_cluster(long_model_dir, kv_cache_bytes=2**24) as cluster:
            (engine,) = cluster.directory.ready("decode")
            request = EngineRequest(
                request_id=RequestId("r"),
                token_ids=tuple(PROMPT),
                num_prompt_tokens=len(PROMPT),
                max_new_tokens=15_000,
                sampling=EngineSampling(),
            )
            deadline = asyncio.get_running_loop().time() + 0.2
            with pytest.raises(DeadlineExceeded):
                _ = [event async for event in engine.run(request, deadline)]
            await cluster.wait_until_empty()

    run_async(scenario())


def test_no_table_grows_with_the_number_of_requests(tiny_model_dir: Path) -> None:
    """Every dict, set, list and queue of both engines and of the gateway, found by looking at all of them."""

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            sizes: list[dict[str, int]] = []
            for _ in range(2):
                for i in range(60):
                    stream = asyncio.ensure_future(cluster.generate(PROMPT[: 1 + i % 30], 1 + i % 4))
                    if i % 3 == 0:
                        await asyncio.sleep(0)
                        stream.cancel()
                    await asyncio.gather(stream, return_exceptions=True)
                await cluster.wait_until_empty()
                sizes.append(table_sizes([*cluster.nodes.values(), cluster.directory, cluster.story]))
            assert sizes[0] == sizes[1]
            assert len(sizes[0]) > 40  # it looks at something

    run_async(scenario())


def test_an_engine_whose_loop_dies_tells_its_owner(tiny_model_dir: Path) -> None:
    """A bug in the scheduler: the owner hears of it, and ends the process."""

    async def scenario() -> None:
        heard: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        config = EngineConfig(role="decode", model_dir=tiny_model_dir, kv_cache_bytes=2**20)
        node = EngineNode(config, failed=lambda error: loop.call_soon_threadsafe(heard.set_result, error))
        bug = ZeroDivisionError("a bug")

        def schedule(now: float) -> None:
            raise bug

        node._engine.scheduler.schedule = schedule  # type: ignore[method-assign,assignment]
        await node.start("127.0.0.1")
        assert await heard is bug
        await node.stop()

    run_async(scenario())
