"""The command line: serve, generate, status, explain, scale, drain, stop, doctor, models."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import grpc
import typer
from google.protobuf import json_format
from rich.console import Console, Group
from rich.live import Live

from pd_service import explain_view, operate, views
from pd_service.channels import channel_options
from pd_service.config import ServiceConfig, load_config
from pd_service.detach import Report, start_in_background
from pd_service.errors import ConfigError, PdError
from pd_service.progress import Progress, shown_progress
from pd_service.rpc import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

if TYPE_CHECKING:
    from pd_service.gateway.gateway import Gateway

app = typer.Typer(
    help="Prefill/decode disaggregation for LLM inference.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

PEERS_TIMEOUT_S = 120.0  # for all pairs, one after the other
WATCH_S = 1.0  # between two looks of `status --watch`
DEFAULT_ADDRESS = "127.0.0.1:50051"
Address = Annotated[str, typer.Option(help="host:port of a gateway's gRPC door.")]


def main() -> None:
    """Entry point: what the user can mend ends with one line on stderr and exit code 1, never with a traceback."""
    try:
        app()
    except PdError as error:
        errors.print(f"[red]error:[/red] {error}", soft_wrap=True)
        sys.exit(1)
    except grpc.RpcError as error:
        code = error.code().name if isinstance(error, grpc.Call) else "UNKNOWN"
        detail = error.details() if isinstance(error, grpc.Call) else error
        errors.print(f"[red]error:[/red] {code}: {detail}", soft_wrap=True)
        sys.exit(1)


# ---- serve


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-f", help="YAML file; flags override it.")] = None,
    model: Annotated[str | None, typer.Option(help='Hugging Face directory, or "demo".')] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill engines.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode engines.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16.")] = None,
    grpc_address: Annotated[str | None, typer.Option("--grpc", help="host:port of the gRPC door; port 0: any.")] = None,
    http_address: Annotated[str | None, typer.Option("--http", help="host:port of the HTTP door; port 0: any.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Join this Ray cluster instead of starting one.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the gateway decides.")] = False,
    is_detached: Annotated[bool, typer.Option("--detach", help="Return when it is ready; it runs on.")] = False,
    report_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a model with a prefill pool and a decode pool until Ctrl-C, or `pd-service stop`."""
    flags = {
        "model": model,
        "pools.prefill.replicas": prefill,
        "pools.decode.replicas": decode,
        "dtype": dtype,
        "gateway.grpc": grpc_address,
        "gateway.http": http_address,
        "ray.address": ray_address,
    }
    settings = load_config(config, {name: value for name, value in flags.items() if value is not None})
    if is_detached:
        sys.exit(_serve_in_background())
    report = None if report_fd is None else Report(report_fd, (console, errors))
    logging.basicConfig(level=logging.INFO if verbose else logging.ERROR, format="%(asctime)s %(name)s %(message)s")
    with shown_progress(console) as progress:
        model_dir = _model_dir(settings, progress)
    asyncio.run(_until_signal(_serve(settings, model_dir, report)))


def _serve_in_background() -> int:
    """This command again, without --detach, in a process of its own."""
    from pd_service.cluster.desired import state_folder

    flags = [word for word in sys.argv[1:] if word != "--detach"]
    log = state_folder() / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    code = start_in_background([sys.executable, "-m", "pd_service.cli", *flags], log, _show)
    _show(f"It writes to {log}\n")
    return code


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _model_dir(config: ServiceConfig, progress: Progress) -> Path:
    if config.model != "demo":
        return Path(config.model).expanduser().resolve()
    from pd_service.demo import demo_model_dir

    return demo_model_dir(lambda stage: progress("demo model", stage))


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or cancels it at the first SIGINT or SIGTERM and waits for its clean-up."""
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        console.print("stopping")
        working.cancel()
    stopping.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    if stop.is_set():
        console.print("stopped")


async def _serve(config: ServiceConfig, model_dir: Path, report: Report | None) -> None:
    with shown_progress(console) as progress:
        from pd_service.cluster.service import running_service  # Ray takes a moment to import

        context = running_service(config, model_dir=model_dir, progress=progress)
        async with contextlib.AsyncExitStack() as stack:
            service = await stack.enter_async_context(context)
            until_stopped = stack.pop_all()
    async with until_stopped:
        _show_service(service.gateway, await service.status())
        if report is None:
            console.print("Ctrl-C stops everything.")
        else:
            command = f"{_own_command()} stop --address {service.gateway.grpc_address}"
            console.print(f"It runs in the background, process {os.getpid()}. To stop it: {command}", soft_wrap=True)
            report.ready()
        await service.until_stopped()


def _own_command() -> str:
    """How another terminal can call this program: by name if it is on the path there, else by its place."""
    return "pd-service" if shutil.which("pd-service") else str(Path(sys.executable).with_name("pd-service"))


def _show_service(gateway: Gateway, status: admin_pb2.StatusResponse) -> None:
    console.print(views.choices_table(status))
    console.print("Try it from another terminal:", style="bold")
    command = f'{_own_command()} generate "Why is the sky blue?" --address {gateway.grpc_address}'
    console.print(f"  {command}", soft_wrap=True)
    body = f'{{"model": "{status.model}", "prompt": "The sea is", "max_tokens": 32}}'
    console.print(
        f"  curl http://{gateway.http_address}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        soft_wrap=True,
    )


# ---- generate


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue or, with a chat model, to answer.")],
    address: Address = DEFAULT_ADDRESS,
    model: Annotated[str, typer.Option(help="Served model; empty: the one that is served.")] = "",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it stands, without the chat template.")
    ] = False,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate.", min=1)] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Probability mass kept.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Most likely tokens kept; 0 keeps all.", min=0)] = 0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.", min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the answer; may be repeated.")] = None,
    n: Annotated[int, typer.Option("--n", help="Number of answers; they differ only with --temperature.", min=1)] = 1,
) -> None:
    """Stream an answer to the terminal, then show where the time went."""
    sampling = generation_pb2.Sampling(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens
    )
    request = generation_pb2.GenerateRequest(model=model, sampling=sampling, stop=stop or [], n=n)
    if raw:
        request.text = prompt
    else:
        request.chat.messages.add(role="user", content=prompt)
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        answer = generation_pb2_grpc.GenerationStub(channel).Generate(request)
        try:
            _print_answer(answer)
        except KeyboardInterrupt:
            answer.cancel()
            console.print("\ncancelled")
            sys.exit(130)


def _print_answer(answer: Iterable[generation_pb2.GenerateResponse]) -> None:
    """Several answers one after another, each with its table."""
    has_text = False
    turns = views.AnswersInTurn()
    try:
        for part in (part for response in answer for part in turns.take(response)):
            if isinstance(part, generation_pb2.Delta):
                print(part.text, end="", flush=True)
                has_text = has_text or bool(part.text)
            else:
                print()
                console.print(views.phases_table(part))
    except grpc.RpcError:
        if has_text:
            print()  # the error starts on a line of its own
        raise


# ---- status


@app.command()
def status(
    address: Address = DEFAULT_ADDRESS,
    is_watching: Annotated[bool, typer.Option("--watch", "-w", help="Again each second, until Ctrl-C.")] = False,
) -> None:
    """Show pools, engines and what they have done."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        answer = admin.Status(admin_pb2.StatusRequest(), timeout=5)
        if not is_watching:
            console.print(views.pools_table(answer), views.engines_table(answer))
            console.print(views.work_table(answer), views.transfers_table(answer))
            return
        with contextlib.suppress(KeyboardInterrupt):
            _watch_status(admin, answer)


def _watch_status(admin: admin_pb2_grpc.AdminStub, answer: admin_pb2.StatusResponse) -> None:
    asked_at = time.monotonic()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_S)
            fresh, now = admin.Status(admin_pb2.StatusRequest(), timeout=5), time.monotonic()
            rates = operate.rates(answer, fresh, now - asked_at)
            shown = Group(views.pools_table(fresh), views.engines_table(fresh, rates))
            if console.is_terminal:
                live.update(shown, refresh=True)
            else:
                console.print(shown)
            answer, asked_at = fresh, now


# ---- scale, drain, stop


@app.command()
def scale(
    sizes: Annotated[list[str], typer.Argument(help="POOL=NUMBER, such as prefill=3 decode=5.")],
    address: Address = DEFAULT_ADDRESS,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until the cluster is as asked.", min=0)] = 900,
) -> None:
    """Ask for other numbers of engines, and show progress until the cluster is as asked."""
    wanted = operate.parse_sizes(sizes)
    with shown_progress(console) as progress:
        operate.scale(address, wanted, timeout, progress)
    console.print("as asked: " + ", ".join(f"{role} {number}" for role, number in wanted.items()))


@app.command()
def drain(
    engine: Annotated[str, typer.Argument(help="Name as status shows it.")],
    address: Address = DEFAULT_ADDRESS,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for running work; then it is stopped; default: as configured.", min=0)
    ] = None,
) -> None:
    """Let an engine finish what it has, give it nothing new, and stop it; its pool gets another one."""
    with shown_progress(console) as progress:
        reason = operate.drain(address, engine, timeout, progress)
    console.print(f"{engine} has left: {reason}")


@app.command()
def stop(
    address: Address = DEFAULT_ADDRESS,
    ray_address: Annotated[
        str | None, typer.Option(help="Stop it in this Ray cluster, without a gateway; even what is left of it.")
    ] = None,
    namespace: Annotated[str | None, typer.Option(help="Its ray.namespace, with --ray-address.")] = None,
) -> None:
    """Stop the service: every engine, the controller, the gateway."""
    if ray_address is None and namespace is not None:
        raise ConfigError("--namespace is of use with --ray-address alone")
    if ray_address is None:
        with shown_progress(console) as progress:
            operate.stop(address, progress)
    else:
        from pd_service.cluster.service import stop_in_ray

        flags = {"ray.address": ray_address} | ({"ray.namespace": namespace} if namespace else {})
        found = asyncio.run(stop_in_ray(load_config(None, flags)))
        console.print(f"stopped: {', '.join(sorted(set(found)))}", soft_wrap=True)
    console.print("stopped")


# ---- explain


@app.command()
def explain(
    request: Annotated[str, typer.Argument(help="Id as in the answer (x-request-id); empty: list recent ones.")] = "",
    address: Address = DEFAULT_ADDRESS,
    limit: Annotated[int, typer.Option(help="Most requests to list.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="The gateway's answer as it is.")] = False,
) -> None:
    """Show where the time of a recent request went, and which hop was slower than usual."""
    asked = admin_pb2.ExplainRequest(request_id=request, limit=limit)
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        answer = admin_pb2_grpc.AdminStub(channel).Explain(asked, timeout=5)
    if as_json:
        print(json_format.MessageToJson(answer, preserving_proto_field_name=True))
    else:
        console.print(explain_view.request_view(answer) if request else explain_view.recent_table(answer))


# ---- doctor, models


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-f", help="YAML file of the service.")] = None,
    model: Annotated[str | None, typer.Option(help='Hugging Face directory, or "demo".')] = None,
    peer: Annotated[bool, typer.Option("--peer", help="Check a running service's pairs of engines instead.")] = False,
    prefill: Annotated[str, typer.Option(help="With --peer: only this prefill engine.")] = "",
    decode: Annotated[str, typer.Option(help="With --peer: only this decode engine.")] = "",
    address: Address = DEFAULT_ADDRESS,
) -> None:
    """Check whether a service could start here, and say what is missing; with --peer, whether its engines reach each
    other, by which data plane and how fast."""
    if peer:
        _check_peers(address, prefill, decode)
        return
    if prefill or decode:
        raise ConfigError("--prefill and --decode name a pair of a running service: they need --peer")
    settings = load_config(config, {} if model is None else {"model": model})
    from pd_service.doctor import examine  # imports torch

    found = examine(settings)
    console.print(views.findings_table(found.findings))
    if found.pools:
        console.print(views.memory_table(found.pools, found.available_bytes))
    if not all(finding.is_ok for finding in found.findings):
        sys.exit(1)


def _check_peers(address: str, prefill: str, decode: str) -> None:
    """Ends with exit code 1 when a pair cannot talk, or there is none."""
    asked = admin_pb2.CheckPeersRequest(prefill=prefill, decode=decode)
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        answer = admin_pb2_grpc.AdminStub(channel).CheckPeers(asked, timeout=PEERS_TIMEOUT_S)
    console.print(views.peers_table(answer))
    if not answer.pairs or any(pair.report.problem for pair in answer.pairs):
        sys.exit(1)


@app.command()
def models() -> None:
    """List the architectures of models that can be served."""
    from pd_service.doctor import architectures  # imports torch

    console.print(views.architectures_table(architectures()))


if __name__ == "__main__":
    main()
