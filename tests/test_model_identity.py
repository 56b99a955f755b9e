"""Who may talk to whom: a gateway and an engine whose model directories differ refuse each other, and both stay up."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import grpc
import pytest

from pd_service.config import PROTOCOL_VERSION, GatewaySettings
from pd_service.errors import Unavailable
from pd_service.gateway.doors import Doors
from pd_service.gateway.engines import Directory, EngineMember
from pd_service.gateway.gateway import Gateway
from pd_service.models.config import fingerprint, load_model_config
from pd_service.rpc import engine_pb2, engine_pb2_grpc
from tests.local_cluster import LocalCluster, eventually, local_cluster
from tests.one_loop import run_async

PROMPT = list(range(3, 40))


def copy_with(model_dir: Path, directory: Path, name: str, content: str | None) -> Path:
    """A copy of the model in which one file is another; None: it is missing."""
    shutil.copytree(model_dir, directory)
    file = directory / name
    if content is None:
        file.unlink()
    else:
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
    return directory


def with_swapped_ids(tokenizer_json: str) -> str:
    """The same tokenizer, in which two words have each other's ids."""
    state = json.loads(tokenizer_json)
    vocab = state["model"]["vocab"]
    first, second = list(vocab)[300:302]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    return json.dumps(state)


def test_the_fingerprint_covers_whatever_turns_text_into_tokens(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    others = {
        "ids": ("tokenizer.json", with_swapped_ids((tiny_model_dir / "tokenizer.json").read_text())),
        "begin": ("tokenizer_config.json", json.dumps(config | {"bos_token": "<|endoftext|>"})),
        "template": ("chat_template.jinja", "{{ messages[0].content }}"),
        "no template": ("chat_template.jinja", None),
        "more templates": ("additional_chat_templates/tool_use.jinja", "{{ messages[0].content }}"),
        "ends": ("generation_config.json", json.dumps({"eos_token_id": [2, 0]})),
        "special": ("special_tokens_map.json", "{}"),
    }
    found = {what: fingerprint(copy_with(tiny_model_dir, tmp_path / what, *change)) for what, change in others.items()}
    found["itself"] = fingerprint(tiny_model_dir)
    assert len(set(found.values())) == len(found), found


def test_the_fingerprint_leaves_out_what_no_token_depends_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    copy = copy_with(tiny_model_dir, tmp_path / "copy", "README.md", "# A model")
    assert fingerprint(copy) == fingerprint(tiny_model_dir)


def members(cluster: LocalCluster) -> list[EngineMember]:
    return [
        EngineMember(engine_id=name, role=cluster.roles[name], address=node.address, incarnation=node.incarnation)
        for name, node in cluster.nodes.items()
    ]


def test_an_engine_refuses_a_gateway_with_another_model_and_names_both(tiny_model_dir: Path) -> None:
    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, decode=0) as cluster:
            node = cluster.nodes["prefill/0"]
            for model in ("0123456789abcdef0123456789abcdef", ""):
                async with grpc.aio.insecure_channel(node.address) as channel:
                    stream = engine_pb2_grpc.EngineStub(channel).Session()
                    hello = engine_pb2.GatewayHello(version=PROTOCOL_VERSION, incarnation=node.incarnation, model=model)
                    await stream.write(engine_pb2.GatewayMessage(hello=hello))
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stream.read()
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                assert repr(model) in (caught.value.details() or "")
                assert fingerprint(tiny_model_dir) in (caught.value.details() or "")
            assert len(await cluster.generate(PROMPT, 1)) == 1

    run_async(scenario())


def test_a_refused_gateway_says_so_once_and_serves_with_the_engines_that_take_it(
    tiny_model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two gateways share an engine's address; one has another chat template, and later gets an engine of its own."""
    other_dir = copy_with(tiny_model_dir, tmp_path / "other", "chat_template.jinja", "{{ messages[0].content }}")

    async def scenario() -> None:
        async with (
            local_cluster(tiny_model_dir, prefill=0, decode=0, mixed=1) as cluster,
            local_cluster(other_dir, prefill=0, decode=0, mixed=1) as other,
        ):
            (foreign,) = members(cluster)
            (own,) = members(other)
            directory = Directory(fingerprint(other_dir))
            await directory.update([foreign])

            async def is_refused() -> bool:
                return bool(directory.refusals())

            await eventually(is_refused, "the engine refuses the gateway")
            await directory.changed.wait()  # a second attempt has been refused
            (refusal,) = directory.refusals()
            assert refusal.startswith(f"{foreign.engine_id} refuses this gateway: model: ")
            assert fingerprint(other_dir) in refusal
            assert fingerprint(tiny_model_dir) in refusal
            assert not directory.ready("prefill")
            with pytest.raises(Unavailable, match="no prefill engine"):
                await directory.wait_for("prefill", 0)
            own_member = EngineMember(
                engine_id="mixed/own", role="mixed", address=own.address, incarnation=own.incarnation
            )
            await directory.update([foreign, own_member])
            assert [client.engine_id for client in await directory.wait_for("prefill", 20)] == ["mixed/own"]
            assert len(await cluster.generate(PROMPT, 4)) == 4
            await directory.close()

    with caplog.at_level(logging.WARNING, "pd_service.gateway.engines"):
        run_async(scenario())
    assert len([message for message in caplog.messages if " refuses this gateway: model: " in message]) == 1


def test_health_says_why_no_engine_is_connected(tiny_model_dir: Path, tmp_path: Path) -> None:
    other_dir = copy_with(tiny_model_dir, tmp_path / "other", "chat_template.jinja", "{{ messages[0].content }}")

    async def scenario() -> None:
        async with local_cluster(tiny_model_dir, prefill=0, decode=0, mixed=1) as cluster:
            settings = GatewaySettings(http="127.0.0.1:0", grpc="127.0.0.1:0")
            doors = Doors(settings)
            gateway = Gateway(
                settings,
                doors,
                model_dir=other_dir,
                model_config=load_model_config(other_dir),
                model_name="other",
                max_model_len=512,
            )
            await gateway.directory.update(members(cluster))

            async def is_told() -> bool:
                return "refuses this gateway: model: " in (gateway.unready_reason() or "")

            await eventually(is_told, "the gateway says why it is not ready")
            await gateway.directory.close()
            await doors.close()

    run_async(scenario())
