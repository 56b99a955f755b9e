"""The whole service as its user meets it: real Ray, gRPC, HTTP and processes; a tiny model."""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import openai
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pd_service.rpc import generation_pb2, generation_pb2_grpc
from tests.local_cluster import eventually
from tests.one_loop import run_async
from tests.served import CLI, Served, cli, served, shared_memory_files

PROMPT = list(range(3, 40))


@pytest.fixture(scope="module")
def service(tiny_model_dir: Path) -> Iterator[Served]:
    with served("--model", str(tiny_model_dir)) as running:
        yield running


def stream(channel: grpc.aio.Channel, max_tokens: int) -> grpc.aio.UnaryStreamCall:
    request = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT),
        sampling=generation_pb2.Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
    )
    return generation_pb2_grpc.GenerationStub(channel).Generate(request)


def test_it_shows_each_engine_and_ready_to_paste_commands(service: Served) -> None:
    for word in ("prefill/", "decode/", "cpu", "paged", "blocks", "pd-service generate", "curl http://"):
        assert word in service.output


def test_generate_streams_text_and_ends_with_the_phases(service: Served) -> None:
    done = cli("generate", "Hello there", "--address", service.grpc_address, "--max-tokens", "8")
    assert done.returncode == 0, done.stderr
    for phase in ("queue", "prefill", "transfer", "confirm", "first decode step", "decode", "total", "tokens/s"):
        assert phase in done.stdout


def test_status_shows_pools_and_engines(service: Served) -> None:
    done = cli("status", "--address", service.grpc_address)
    assert done.returncode == 0, done.stderr
    for word in ("prefill", "decode", "ready", "leases", "KV blocks", "computed", "from cache", "received"):
        assert word in done.stdout


def test_a_request_can_be_explained_and_a_scrape_shows_its_engines(service: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    headers = {"x-request-id": "slow-one"}
    assert httpx.post(f"{service.base_url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
    done = cli("explain", "slow-one", "--address", service.grpc_address)
    assert done.returncode == 0, done.stderr
    for word in (
        "slow-one: finished",
        "sent to prefill",
        "first token",
        "sent to decode",
        "decoding",
        "prefill/",
        "MB",
    ):
        assert word in done.stdout
    listed = json.loads(cli("explain", "--json", "--address", service.grpc_address).stdout)
    assert listed["requests"][0]["request_id"] == "slow-one"
    unknown = cli("explain", "nobody", "--address", service.grpc_address)
    assert unknown.returncode == 1
    assert "no request 'nobody' is known" in unknown.stderr
    metrics = httpx.get(f"{service.base_url}/metrics", timeout=60).text
    assert re.search(r'pd_engine_up\{engine="decode/\w+",role="decode"\} 1.0', metrics)
    assert re.search(r'pd_pulls_confirmed_total\{engine="decode/\w+"\} [1-9]', metrics)


def test_doctor_checks_the_pairs_of_a_running_service(service: Served) -> None:
    done = cli("doctor", "--peer", "--address", service.grpc_address)
    assert done.returncode == 0, done.stderr
    for word in ("prefill/", "decode/", "shm", "ok", "buffers alike", "GB/s"):
        assert word in done.stdout
    refused = cli("doctor", "--peer", "--decode", "decode/none", "--address", service.grpc_address)
    assert refused.returncode == 1
    assert "no decode engine 'decode/none' serves" in refused.stderr
    assert "need --peer" in cli("doctor", "--decode", "decode/none").stderr


def test_what_the_user_can_mend_is_one_line(service: Served, tmp_path: Path) -> None:
    refused = cli("generate", "x", "--address", service.grpc_address, "--model", "other")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "'other'" in refused.stderr
    for arguments, said in (
        (["serve", "--model", str(tmp_path)], "LlamaForCausalLM"),
        (["serve", "--dtype", "int3"], "dtype"),
        (["serve", "-f", str(tmp_path / "missing.yaml")], "missing.yaml"),
        (["serve", "--model", "demo", "--decode", "-1"], "pools.decode.replicas"),
        (["status", "--address", "127.0.0.1:1"], "UNAVAILABLE"),
    ):
        done = cli(*arguments)
        assert done.returncode == 1, done
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_an_unknown_key_in_the_configuration_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("pools:\n  prefill:\n    replicaz: 2\n")
    done = cli("serve", "-f", str(path))
    assert done.returncode == 1
    assert "pools.prefill.replicaz: unknown field" in done.stderr


def test_a_port_in_use_is_named(tiny_model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flag in ("--grpc", "--http"):
            flags = {"--grpc": "127.0.0.1:0", "--http": "127.0.0.1:0"} | {flag: address}
            done = cli("serve", "--model", str(tiny_model_dir), *(word for item in flags.items() for word in item))
            assert done.returncode == 1
            assert address in done.stderr


def test_http_and_grpc_give_the_same_tokens(service: Served) -> None:
    async def over_grpc() -> list[int]:
        return await service.tokens(PROMPT, 12, ignore_eos=True)

    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    whole = httpx.post(f"{service.base_url}/v1/completions", json=body, timeout=60).json()
    with httpx.stream("POST", f"{service.base_url}/v1/completions", json=body | {"stream": True}, timeout=60) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids") or []]
    assert len(streamed) == 12
    assert whole["choices"][0]["token_ids"] == streamed == run_async(over_grpc())
    assert whole["choices"][0]["text"] == "".join(c["text"] for chunk in chunks for c in chunk["choices"])


def test_health_and_metrics(service: Served) -> None:
    assert httpx.get(f"{service.base_url}/health").status_code == 200
    metrics = httpx.get(f"{service.base_url}/metrics").text
    assert 'pd_requests_total{outcome="finished"}' in metrics


def test_the_official_client_works(service: Served) -> None:
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        ask = {"model": model.id, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
        whole = client.chat.completions.create(**ask)  # type: ignore[call-overload]
        chunks = list(client.chat.completions.create(**ask, stream=True))  # type: ignore[call-overload]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 6


def test_output_that_nobody_reads_is_no_error(service: Served) -> None:
    command = f"{' '.join(CLI)} generate hello --raw --address {service.grpc_address} --max-tokens 200 | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_a_client_killed_in_mid_stream_leaves_nothing(service: Served, door: str) -> None:
    body = json.dumps({"prompt": PROMPT, "max_tokens": 470, "stream": True, "ignore_eos": True})
    command = {
        "grpc": [*CLI, "generate", "Hello", "--raw", "--address", service.grpc_address, "--max-tokens", "480"],
        "http": [
            "curl",
            "-sN",
            f"{service.base_url}/v1/completions",
            "-H",
            "Content-Type: application/json",
            "-d",
            body,
        ],
    }[door]
    client = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert client.stdout is not None
    assert client.stdout.read(1)  # it streams
    client.kill()
    client.wait()
    client.stdout.close()
    run_async(eventually(service.is_empty, "all blocks are free and no lease is left"))


async def healths(service: Served) -> tuple[int, int]:
    """What HTTP and gRPC say."""
    async with httpx.AsyncClient() as client, service.channel() as channel:
        over_http = await client.get(f"{service.base_url}/health")
        over_grpc = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return over_http.status_code, int(over_grpc.status)


async def is_down(service: Served) -> bool:
    return await healths(service) == (503, health_pb2.HealthCheckResponse.NOT_SERVING)


async def is_up(service: Served) -> bool:
    return await healths(service) == (200, health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_stream_survives_the_kill_of_its_only_engine(service: Served, role: str) -> None:
    async def scenario() -> None:
        expected = await service.tokens(PROMPT, 300, ignore_eos=True)
        before = {pool.role: pool.replaced for pool in (await service.status()).pools}
        (victim,) = [e for e in (await service.status()).engines if e.member.role == role]
        async with service.channel() as channel:
            tokens: list[int] = []
            finish = None
            async for response in stream(channel, 300):
                tokens += response.delta.token_ids
                if victim.status.pid and len(tokens) > 5:
                    os.kill(victim.status.pid, signal.SIGKILL)
                    victim.status.pid = 0
                    await eventually(lambda: is_down(service), "both health checks see the empty pool")
                if response.HasField("finish"):
                    finish = response.finish
        assert tokens == expected
        assert finish is not None
        assert finish.retries >= (role == "decode")
        await eventually(service.is_empty, "the replacement is ready and nothing is held")
        await eventually(lambda: is_up(service), "both health checks see the replacement")
        after = {pool.role: pool.replaced for pool in (await service.status()).pools}
        assert after == before | {role: before[role] + 1}

    run_async(scenario())


def test_two_services_on_one_host(service: Served, tiny_model_dir: Path) -> None:
    expected = run_async(service.tokens(PROMPT, 8, ignore_eos=True))
    with served("--model", str(tiny_model_dir)) as other:
        assert other.grpc_address != service.grpc_address
        assert run_async(other.tokens(PROMPT, 8, ignore_eos=True)) == expected
        assert "stopped" in other.stop()
    assert run_async(service.tokens(PROMPT, 8, ignore_eos=True)) == expected


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_in_mid_stream_leaves_no_process_and_no_shared_memory(long_model_dir: Path, signum: int) -> None:
    files = shared_memory_files()
    with served("--model", str(long_model_dir)) as service:
        children = service.processes()
        assert any("EngineActor" in " ".join(child.cmdline()) for child in children)
        statuses: list[tuple[grpc.StatusCode, str]] = []
        first = threading.Event()

        async def client() -> None:
            async with service.channel() as channel:
                call = stream(channel, 16000)
                try:
                    async for _ in call:
                        first.set()
                except grpc.aio.AioRpcError as error:
                    statuses.append((error.code(), error.details()))

        streaming = threading.Thread(target=lambda: run_async(client()))
        streaming.start()
        assert first.wait(30)
        rest = service.stop(signum)
        streaming.join()
        assert service.process.returncode == 0, rest
        assert rest.splitlines() == ["stopping", "stopped"]
        assert statuses == [(grpc.StatusCode.UNAVAILABLE, "the gateway is stopping")]
        _, alive = psutil.wait_procs(children, timeout=10)
        assert not alive
    assert shared_memory_files() <= files


def test_a_stop_while_it_starts_leaves_no_process(tiny_model_dir: Path) -> None:
    process = subprocess.Popen(
        [*CLI, "serve", "--model", str(tiny_model_dir), "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "prefill/" in line:  # the engines are on their way
            break
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0, rest
    assert rest.splitlines()[-2:] == ["stopping", "stopped"]
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_an_engine_that_cannot_start_says_why_at_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("pools: {decode: {kv_cache_bytes: 1000}}\ngateway: {grpc: '127.0.0.1:0', http: '127.0.0.1:0'}\n")
    done = cli("serve", "--model", str(tiny_model_dir), "-f", str(path))
    assert done.returncode == 1
    assert "decode" in done.stderr
    assert "KV cache" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_names_what_is_wrong(tiny_model_dir: Path, service: Served) -> None:
    done = cli("doctor", "--model", str(tiny_model_dir))
    for word in ("LlamaForCausalLM", "weights", "tokens that fit"):
        assert word in done.stdout
    path = tiny_model_dir.parent / "doctor.yaml"
    path.write_text(f"gateway: {{grpc: '{service.grpc_address}'}}\n")
    taken = cli("doctor", "--model", "/nowhere", "-f", str(path))
    assert taken.returncode == 1
    assert "cannot be bound" in taken.stdout
    assert "/nowhere" in taken.stdout


def test_models_are_listed() -> None:
    done = cli("models")
    assert done.returncode == 0, done.stderr
    assert "LlamaForCausalLM" in done.stdout


def test_a_detached_service_runs_on_until_it_is_stopped(tiny_model_dir: Path, tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    flags = ("--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--model", str(tiny_model_dir))
    started = cli("serve", *flags, "--detach", environment=environment)
    assert started.returncode == 0, started.stdout
    found = re.search(r"process (\d+). To stop it: \S+ stop --address (\S+)", started.stdout)
    assert found, started.stdout
    process, address = psutil.Process(int(found[1])), found[2]
    everything = [process, *process.children(recursive=True)]
    try:
        assert cli("generate", "Hello", "--raw", "--address", address, "--max-tokens", "4").returncode == 0
        stopped = cli("stop", "--address", address)
        assert (stopped.returncode, stopped.stdout.splitlines()[-1]) == (0, "stopped"), stopped.stderr
        _, alive = psutil.wait_procs(everything, timeout=20)
        assert not alive
    finally:
        for left in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
    assert [path.suffix for path in (tmp_path / "pd-service").iterdir()] == [".log"]


def test_a_detached_service_that_cannot_start_says_why(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = cli("serve", "--model", str(tmp_path), "--detach", environment=environment)
    assert (done.returncode, "LlamaForCausalLM" in done.stdout) == (1, True), done


def test_status_is_watched_until_it_is_interrupted(service: Served) -> None:
    command = [*CLI, "status", "--watch", "--address", service.grpc_address]
    watching = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert watching.stdout is not None
    shown = "".join(itertools.takewhile(lambda line: "tokens/s" not in line, watching.stdout))
    watching.send_signal(signal.SIGINT)
    rest, _ = watching.communicate(timeout=20)
    assert watching.returncode == 0, shown + rest


def test_a_ray_address_where_nobody_answers_is_named() -> None:
    done = cli("serve", "--ray-address", "127.0.0.1:1", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert done.returncode == 1
    assert "no Ray cluster answers at '127.0.0.1:1'" in done.stderr
