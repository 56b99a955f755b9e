"""Handshakes between engines: what is refused, what is said about it, and when it is tried again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_service.channels import EOF, Context
from pd_service.config import PROTOCOL_VERSION, EngineSettings, GatewaySettings, RetrySettings
from pd_service.errors import TransferFailed, Unavailable
from pd_service.node import reader as reader_module
from pd_service.node.handshake import reasons_against_holder, reasons_against_reader
from pd_service.node.layout_wire import layout_to_wire
from pd_service.node.peer import Peer
from pd_service.node.reader import Reader
from pd_service.rpc import kv_transfer_pb2 as pb
from pd_service.rpc import kv_transfer_pb2_grpc
from tests.local_cluster import LocalCluster, eventually, local_cluster
from tests.one_loop import run_async
from transfer.layout import LAYOUT_VERSION, BufferLayout, EngineLayout
from transfer.planes import MemoryPlane
from transfer.planes.base import Buffers

PROMPT = list(range(3, 40))
BUFFER = BufferLayout(
    layer=0, cache_name="k_cache", attn_type="FullAttention", block_size=16, first_head=0, num_heads=2, total_heads=2,
    dim=4, dtype="float32", num_bytes=0,
)  # fmt: skip
LAYOUT = EngineLayout(version=LAYOUT_VERSION, model="m", buffers=(BUFFER,))
OTHER_LAYOUT = EngineLayout(version=LAYOUT_VERSION, model="other", buffers=(replace(BUFFER, block_size=8, dim=6),))

# What differs, and what every side must say then: both values of each.
SAYS: dict[str, list[tuple[str, ...]]] = {
    "version": [("protocol version", str(PROTOCOL_VERSION), str(PROTOCOL_VERSION + 7))],
    "incarnation": [("incarnation", "'asked'", "'present'")],
    "layout": [("model", "'m'", "'other'"), ("block_size", "16", "8"), ("dim", "4", "6")],
    "planes": [("data planes", "fast, slow", "tcp")],
}


def says(reasons: list[str], wanted: tuple[str, ...]) -> bool:
    return any(all(word in reason for word in wanted) for reason in reasons)


def reader_hello(differing: set[str]) -> pb.ReaderHello:
    return pb.ReaderHello(
        version=PROTOCOL_VERSION + 7 * ("version" in differing),
        incarnation="reader",
        holder_incarnation="asked" if "incarnation" in differing else "present",
        layout=layout_to_wire(OTHER_LAYOUT if "layout" in differing else LAYOUT),
        planes=["fast", "slow"] if "planes" in differing else ["fast", "tcp"],
    )


def holder_hello(differing: set[str]) -> pb.HolderHello:
    return pb.HolderHello(
        version=PROTOCOL_VERSION + 7 * ("version" in differing),
        incarnation="present" if "incarnation" in differing else "asked",
        layout=layout_to_wire(OTHER_LAYOUT if "layout" in differing else LAYOUT),
        planes=[],
    )


@given(st.sets(st.sampled_from(sorted(SAYS))))
def test_a_holder_names_exactly_what_differs_and_both_values(differing: set[str]) -> None:
    reasons = reasons_against_reader(reader_hello(differing), "present", LAYOUT, ["tcp"])
    assert len(reasons) == sum(len(SAYS[what]) for what in differing)
    assert all(says(reasons, wanted) for what in differing for wanted in SAYS[what])


@given(st.sets(st.sampled_from(sorted(SAYS.keys() - {"planes"}))))
def test_a_reader_names_exactly_what_differs_and_both_values(differing: set[str]) -> None:
    reasons = reasons_against_holder(holder_hello(differing), "asked", LAYOUT)
    assert len(reasons) == sum(len(SAYS[what]) for what in differing)
    assert all(says(reasons, wanted) for what in differing for wanted in SAYS[what])


def test_a_malformed_layout_is_one_reason_beside_the_others() -> None:
    hello = reader_hello({"version"})
    hello.layout.buffers[0].dtype = "float33"
    reasons = reasons_against_reader(hello, "present", LAYOUT, ["tcp"])
    assert len(reasons) == 2
    assert says(reasons, ("malformed", "float33"))


class ForeignHolder(kv_transfer_pb2_grpc.KvTransferServicer):
    """A holder of another release: it looks at nothing and says what it is told to."""

    def __init__(self, answer: pb.HolderMessage | None) -> None:
        self._answer = answer

    async def Channel(self, request_iterator: AsyncIterator[pb.ReaderMessage], context: Context) -> None:
        await context.read()
        if self._answer is not None:
            await context.write(self._answer)
        await context.read()  # until the reader leaves


@asynccontextmanager
async def foreign_holder(answer: pb.HolderMessage | None) -> AsyncIterator[str]:
    server = grpc.aio.server()
    kv_transfer_pb2_grpc.add_KvTransferServicer_to_server(ForeignHolder(answer), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def handshake_with(answer: pb.HolderMessage) -> Peer:
    """A peer whose handshake with such a holder has failed and which is closed."""

    async def scenario() -> Peer:
        async with foreign_holder(answer) as address:
            peer = Peer(address, "asked", timeout_s=5)
            with pytest.raises(TransferFailed):
                await peer.connect("reader", LAYOUT, [MemoryPlane()], Buffers(ptrs=(0,), lens=(0,)))
            await peer.close()
            return peer

    return run_async(scenario())


def test_a_holder_that_does_not_look_is_refused_by_the_reader_with_every_difference() -> None:
    differing = {"version", "incarnation", "layout"}
    peer = handshake_with(pb.HolderMessage(hello=holder_hello(differing)))
    assert peer.refusal is not None
    assert all(says(peer.refusal.split(";"), wanted) for what in differing for wanted in SAYS[what])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (pb.HolderMessage(refused=pb.Refused(reasons=["one", "two"])), "one; two"),
        (pb.HolderMessage(refused=pb.Refused()), "no reason"),
        (pb.HolderMessage(ended=pb.TicketEnded(lease_id="x")), "no reason"),
        (pb.HolderMessage(hello=holder_hello(set())), "memory: not offered"),
    ],
    ids=["reasons", "no reasons", "no hello", "no plane"],
)
def test_whatever_a_holder_says_instead_of_a_fitting_hello_is_a_refusal(answer: pb.HolderMessage, said: str) -> None:
    assert said in (handshake_with(answer).refusal or "")


def test_both_logs_name_every_difference_and_both_engines_go_on_serving_others(
    tiny_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with (
            local_cluster(tiny_model_dir, settings=EngineSettings(planes=("memory",))) as ours,
            local_cluster(tiny_model_dir, settings=EngineSettings(planes=("tcp",), block_size=8)) as others,
        ):
            holder, reader = others.nodes["prefill/0"], ours.nodes["decode/1"]._reader
            reader.meet(holder.address, "another life")
            await eventually(_knows_refusals(reader, 1), "the reader is refused")
            for cluster in (ours, others):
                assert len(await cluster.generate(PROMPT, 4)) == 4

    with caplog.at_level(logging.WARNING):
        run_async(scenario())
    wanted = [("incarnation", "another life"), ("data planes", "memory", "tcp"), ("block_size", "16", "8")]
    for module in ("holder", "reader"):
        said = [record.getMessage() for record in caplog.records if record.name == f"pd_service.node.{module}"]
        assert len(said) == 1
        assert all(says(said[0].split(";"), one) for one in wanted)


def _knows_refusals(reader: Reader, num: int) -> Callable[[], Awaitable[bool]]:
    async def does() -> bool:
        return len(reader._refusals) == num

    return does


def _has_met(cluster: LocalCluster, num: int) -> Callable[[], Awaitable[bool]]:
    """Every decode engine has a channel to `num` holders."""

    async def has() -> bool:
        readers = [node._reader for name, node in cluster.nodes.items() if cluster.roles[name] == "decode"]
        return all(len(reader.choices()) == num == len(reader._peers) for reader in readers)

    return has


@pytest.fixture
def handshakes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were greeted, in order."""
    greeted: list[str] = []
    connect = Peer.connect

    async def counted(self: Peer, *args: object) -> None:
        greeted.append(self.address)
        await connect(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Peer, "connect", counted)
    return greeted


def test_no_request_pays_for_a_handshake(tiny_model_dir: Path, handshakes: list[str]) -> None:
    """Engines meet when they appear, and again when one comes back under its old address."""

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, prefill=2, decode=2) as cluster:
            await eventually(_has_met(cluster, 2), "all have met")
            assert len(handshakes) == 4
            await asyncio.gather(*(cluster.generate(PROMPT, 3) for _ in range(8)))
            await cluster.publish()  # the same members again
            assert len(handshakes) == 4
            for role, num_new in (("prefill", 2), ("decode", 2)):
                before = len(handshakes)
                await restart(cluster, next(name for name in cluster.nodes if name.startswith(role)))
                await eventually(_has_met(cluster, 2), "all have met again")
                assert len(handshakes) == before + num_new
                await asyncio.gather(*(cluster.generate(PROMPT, 3) for _ in range(8)))
                assert len(handshakes) == before + num_new

    run_async(scenario())


async def restart(cluster: LocalCluster, name: str) -> None:
    """A new life of this engine at the same address, without a membership between the two."""
    old = cluster.nodes.pop(name)
    await old.stop()
    new = await asyncio.to_thread(type(old), old._config)
    assert await new.start("127.0.0.1", int(old.address.rpartition(":")[2])) == old.address
    cluster.nodes[name] = new
    await cluster.publish()
    await cluster.directory.wait_for(cluster.roles[name], 20)


def test_a_refused_pair_is_tried_again_with_the_membership_or_after_a_pause_and_not_before(
    tiny_model_dir: Path, handshakes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = GatewaySettings(retry=RetrySettings(max_failures=0))

    async def scenario() -> None:
        async with (
            local_cluster(tiny_model_dir, decode=0, gateway=gateway) as cluster,
            local_cluster(tiny_model_dir, prefill=0, settings=EngineSettings(block_size=8)) as other,
        ):
            reader = other.nodes["decode/0"]._reader
            cluster.nodes["decode/other"], cluster.roles["decode/other"] = other.nodes["decode/0"], "decode"
            await cluster.publish()
            await eventually(_knows_refusals(reader, 1), "the pair is refused")
            for _ in range(3):
                with pytest.raises(Unavailable, match=r"block_size differs: 8 and 16"):
                    await cluster.generate(PROMPT, 4)
            assert len(handshakes) == 1
            monkeypatch.setattr(reader_module, "REFUSAL_PAUSE_S", 0.01)
            await cluster.publish()
            await eventually(_knows_refusals(reader, 0), "the pause is over")
            assert len(handshakes) == 2
            with pytest.raises(Unavailable, match="block_size"):
                await cluster.generate(PROMPT, 4)
            assert len(handshakes) > 2
            await eventually(_knows_refusals(reader, 0), "the pause is over, and no entry is left")
            assert not reader._peers
            del cluster.nodes["decode/other"]

    run_async(scenario())


def test_a_plane_that_connects_after_its_channel_was_closed_is_closed_too(tiny_model_dir: Path) -> None:
    """The handshake is cancelled while a thread connects the plane."""

    class SlowPlane(MemoryPlane):
        def __init__(self) -> None:
            self.loop = asyncio.get_running_loop()
            self.begun, self.may_end = asyncio.Event(), asyncio.Event()
            self.closed: list[bool] = []

        def connect(self, *_: object) -> SlowPlane:  # type: ignore[override]
            self.loop.call_soon_threadsafe(self.begun.set)
            asyncio.run_coroutine_threadsafe(self.may_end.wait(), self.loop).result()
            return self

        def close(self) -> None:
            self.closed.append(True)
            self.loop.call_soon_threadsafe(self.begun.clear)

    async def scenario() -> None:
        plane = SlowPlane()
        hello = holder_hello(set())
        hello.planes.add(name=plane.name, endpoint=b"\x80")
        async with foreign_holder(pb.HolderMessage(hello=hello)) as address:
            peer = Peer(address, "asked", timeout_s=5)
            connecting = asyncio.create_task(
                peer.connect("reader", LAYOUT, [plane], Buffers(ptrs=(0,), lens=(0,)))  # type: ignore[list-item]
            )
            await plane.begun.wait()
            connecting.cancel()
            await asyncio.wait((connecting,))
            await peer.close()
            assert not plane.closed
            plane.may_end.set()

            async def is_closed() -> bool:
                return plane.closed == [True]

            await eventually(is_closed, "the late plane is closed")

    run_async(scenario())


def test_a_reader_that_says_no_hello_is_refused_and_no_other_notices(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir) as cluster:
            async with grpc.aio.insecure_channel(cluster.nodes["prefill/0"].address) as channel:
                stream = kv_transfer_pb2_grpc.KvTransferStub(channel).Channel()
                await stream.write(pb.ReaderMessage(open=pb.OpenTicket(lease_id="x", pull_id=1)))
                assert list((await stream.read()).refused.reasons) == ["the first message must be a hello"]
                assert await stream.read() is EOF
            assert len(await cluster.generate(PROMPT, 4)) == 4

    run_async(scenario())
