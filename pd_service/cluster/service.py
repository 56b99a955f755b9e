"""A whole service on Ray: start or join a cluster, start the controller, run a gateway in this process, stop it all.

async with running_service(config, model_dir=model_dir, progress=progress) as service:
    await service.until_stopped()     # doors open, every engine ready
# nothing of it is left: no actor, no placement, no process, no shared memory
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import ray

from pd_service.channels import channel_options, end
from pd_service.cluster.controller import Controller
from pd_service.cluster.ray_names import CONTROLLER, HEAD, ROLES, find_actor, remove_everything
from pd_service.config import PoolRole, ServiceConfig
from pd_service.errors import ConfigError
from pd_service.gateway.doors import Doors
from pd_service.host_memory import available_bytes
from pd_service.models.config import limit_length, load_model_config, require_supported
from pd_service.progress import READY, Progress
from pd_service.rpc import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    from pd_service.gateway.gateway import Gateway

logger = logging.getLogger(__name__)

RAY_REACH_S = 5.0
MEETING_S = 5.0  # for decode engines to connect to prefill engines
RECONNECT_S = 0.5  # between attempts at a controller that is away
CONTROLLER_STOP_S = 3.0  # of the five seconds a whole stop may take
CONTROLLER_RETRY_S = 0.1  # between attempts at one that is just being restarted


@dataclass(slots=True)
class Service:
    """A running service, as the process that started it sees it."""

    gateway: Gateway
    admin_address: str

    async def status(self) -> admin_pb2.StatusResponse:
        async with grpc.aio.insecure_channel(self.admin_address, options=channel_options()) as channel:
            answer: admin_pb2.StatusResponse = await admin_pb2_grpc.AdminStub(channel).Status(admin_pb2.StatusRequest())
            return answer

    async def until_stopped(self) -> None:
        """Returns when an operator has asked the controller to stop, or has removed it; until Ray has restarted one
        that died, it is waited for.
        """
        async with grpc.aio.insecure_channel(self.admin_address, options=channel_options()) as channel:
            admin = admin_pb2_grpc.AdminStub(channel)
            while True:
                with suppress(grpc.aio.AioRpcError):
                    async for membership in admin.WatchMembership(admin_pb2.WatchMembershipRequest()):
                        if membership.is_stopping:
                            return
                if await asyncio.to_thread(find_actor, CONTROLLER) is None:
                    return
                await asyncio.sleep(RECONNECT_S)


@asynccontextmanager
async def running_service(config: ServiceConfig, *, model_dir: Path, progress: Progress) -> AsyncIterator[Service]:
    """Yields when both pools can answer. Raises ConfigError when the service cannot start as asked."""
    require_supported(model_dir)
    if config.ray.address is not None:
        await _require_reachable(config.ray.address)
    model_name = config.served_model_name or model_dir.name
    free = available_bytes()  # before any engine takes its part
    doors = Doors(config.gateway)
    try:
        progress("Ray", "starting")
        async with (
            _running_ray(config) as host,
            _running_controller(config, model_dir, model_name, host) as admin_address,
            AsyncExitStack() as until_stopped,
        ):
            progress("Ray", READY)
            make = partial(_make_gateway, config, doors, model_dir, model_name, free)
            roles = [role for role in ROLES if config.pool(role).replicas]
            opening = _open_gateway(make, roles, admin_address, until_stopped, progress)
            yield await _unless_an_engine_fails(opening, admin_address, progress)
    finally:
        await doors.close()


@asynccontextmanager
async def _running_ray(config: ServiceConfig) -> AsyncIterator[str | None]:
    """The address engines listen on, None for each node's own; at the end this process has left Ray."""
    starting = asyncio.ensure_future(asyncio.to_thread(_start_ray_patiently, config))
    try:
        host = await asyncio.shield(starting)
        _take_signals_back()
        yield host
    finally:
        with suppress(ConfigError):
            await starting  # a start that was interrupted has to end before it can be undone
        await asyncio.to_thread(ray.shutdown)


async def _require_reachable(address: str) -> None:
    """Ray itself would try for ever. "auto" is what Ray finds on this host by itself."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        async with asyncio.timeout(RAY_REACH_S):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, ValueError, OverflowError, TimeoutError) as error:
        raise ConfigError(f"ray.address: no Ray cluster answers at {address!r}: {error!r}") from error
    writer.close()


async def _open_gateway(
    make_gateway: Callable[[], Gateway],
    roles: Collection[PoolRole],
    admin_address: str,
    until_stopped: AsyncExitStack,
    progress: Progress,
) -> Service:
    """Returns when the gateway is connected to the pools of these roles; it is stopped with `until_stopped`."""
    progress("gateway", "loading libraries")
    # In a thread, beside the engines that load. Not while Ray starts: it makes Ray take as much longer, and Ray forks
    # its processes with Python code in between, where no other thread should be in the midst of an import.
    gateway = await asyncio.to_thread(make_gateway)
    await gateway.start(admin_address)
    until_stopped.push_async_callback(gateway.stop)
    progress("gateway", "waiting for engines")
    await gateway.wait_until_ready(roles)
    service = Service(gateway=gateway, admin_address=admin_address)
    await _wait_until_met(service)
    progress("gateway", READY)
    return service


def _make_gateway(config: ServiceConfig, doors: Doors, model_dir: Path, model_name: str, free: int) -> Gateway:
    """`free`: bytes of memory that the engines found here, all of them together."""
    from pd_service.engine.memory_plan import lack_of_memory, plan_pools
    from pd_service.gateway.gateway import Gateway  # with transformers and torch: seconds

    model_config = load_model_config(model_dir)
    lack = lack_of_memory(plan_pools(config, model_dir, model_config), free)
    if lack is not None and config.ray.address is None:
        raise ConfigError(lack)
    model_config = limit_length(model_config, config.engine.max_model_len)
    return Gateway(
        config.gateway,
        doors,
        model_dir=model_dir,
        model_config=model_config,
        model_name=model_name,
        max_model_len=model_config.max_model_len,
    )


@asynccontextmanager
async def _running_controller(
    config: ServiceConfig, model_dir: Path, model_name: str, host: str | None
) -> AsyncIterator[str]:
    """The controller's address; at the end it and all its engines are gone."""
    actor_class: Any = ray.remote(Controller)
    try:
        controller = actor_class.options(
            name=CONTROLLER,
            lifetime="detached",
            num_cpus=0,
            resources={HEAD: 0.001},  # where its file is
            max_restarts=-1,
            max_concurrency=1000,
        ).remote(config.model_dump(mode="json"), str(model_dir), model_name, host, secrets.token_hex(8))
    except ValueError as error:
        name = config.ray.namespace
        raise ConfigError(
            f"ray.namespace: a service named {name!r} runs in this Ray cluster; stop it, or choose another name"
        ) from error
    try:
        yield await _address_of(controller)
    finally:
        await _stop_controller(controller)


async def _address_of(controller: Any) -> str:
    try:
        address: str = await controller.address.remote()
    except ray.exceptions.RayError as error:
        raise ConfigError(f"the controller cannot start: {error}") from error
    return address


async def _stop_controller(controller: Any) -> list[str]:
    """Asks it to stop, over its restarts; whatever is left after a while is killed. Returns the names of that."""
    with suppress(TimeoutError):
        async with asyncio.timeout(CONTROLLER_STOP_S):
            while not await _has_stopped(controller):  # noqa: ASYNC110  # Ray tells nobody when it is back
                await asyncio.sleep(CONTROLLER_RETRY_S)
    ray.kill(controller)
    left = await asyncio.to_thread(remove_everything, ray.get_runtime_context().namespace)
    left = [name for name in left if name != CONTROLLER]
    if left:
        logger.warning("killed, because the controller did not stop them in time: %s", ", ".join(left))
    return left


async def _has_stopped(controller: Any) -> bool:
    try:
        await controller.stop.remote()
    except ray.exceptions.RayError as error:
        logger.info("the controller does not stop yet: %r", error)
        return isinstance(error, ray.exceptions.ActorDiedError)
    return True


async def stop_in_ray(config: ServiceConfig) -> list[str]:
    """Stops a service by its name in the Ray cluster of the configuration, whether its gateway and its controller are
    still there or not. Returns what it found. Raises ConfigError when there is nothing of that name.
    """
    if config.ray.address is None:
        raise ConfigError("ray.address: the Ray cluster of the service has to be named")
    await _require_reachable(config.ray.address)
    async with _running_ray(config):
        controller = find_actor(CONTROLLER)
        found: list[str] = await asyncio.to_thread(ray.util.list_named_actors)
        if controller is not None:
            return found + await _stop_controller(controller)
        found = await asyncio.to_thread(remove_everything, config.ray.namespace)
        if not found:
            raise ConfigError(f"ray.namespace: no service named {config.ray.namespace!r} is in this Ray cluster")
        return found


def _start_ray_patiently(config: ServiceConfig) -> str | None:
    """A local Ray whose raylet never comes up, which happens now and then, is tried once more."""
    try:
        return _start_ray(config)
    except ConfigError as error:
        if config.ray.address is not None:
            raise
        logger.warning("%s; trying once more", error)
        ray.shutdown()
        return _start_ray(config)


def _start_ray(config: ServiceConfig) -> str | None:
    """Returns the address engines listen on, None for each node's own in a cluster that was joined."""
    common: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "namespace": config.ray.namespace,
    }
    try:
        if config.ray.address is not None:
            ray.init(address=config.ray.address, **common)
            return None
        pools = (config.pools.prefill, config.pools.decode)
        asked = math.ceil(sum(pool.max_replicas * pool.num_cpus for pool in pools))
        ray.init(
            address="local",
            num_cpus=max(asked, os.cpu_count() or 1),  # a laptop runs the cluster it is asked for
            include_dashboard=False,
            object_store_memory=80 * 2**20,  # requests never pass through Ray: its smallest store is enough
            **common,
        )
    except Exception as error:  # Ray raises bare Exceptions as well; none of them is ours
        hint = "" if config.ray.address is None else " (a cluster with token authentication needs RAY_AUTH_MODE=token)"
        raise ConfigError(f"Ray cannot be started or joined: {error}{hint}") from error
    return "127.0.0.1"


def _take_signals_back() -> None:
    """Ray's core answers SIGTERM with a stack trace; installing Python's present handler again undoes that."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


async def _unless_an_engine_fails(
    opening: Coroutine[Any, Any, Service], admin_address: str, progress: Progress
) -> Service:
    """What `opening` returns, with the engines' progress shown meanwhile. An engine that cannot start for a reason that
    stays (a model that does not load, a cache that does not fit) ends the wait.
    """
    service = asyncio.create_task(opening)
    failure = asyncio.create_task(_show_progress(admin_address, progress))
    try:
        await asyncio.wait((service, failure), return_when=asyncio.FIRST_COMPLETED)
        if not service.done():
            raise ConfigError(failure.result())
        return await service
    finally:
        await end(service)
        await end(failure)


async def _wait_until_met(service: Service) -> None:
    """Engines meet in milliseconds; one that cannot is no reason not to serve, its status says why."""
    with suppress(TimeoutError):
        async with asyncio.timeout(MEETING_S):
            while not _have_met(await service.status()):  # noqa: ASYNC110  # engines tell nobody that they met
                await asyncio.sleep(MEETING_S / 100)


def _have_met(status: admin_pb2.StatusResponse) -> bool:
    ready = [engine for engine in status.engines if engine.member.state == "ready"]
    num_holders = sum(engine.member.role == "prefill" for engine in ready)
    return all(engine.status.holders >= num_holders for engine in ready if engine.member.role == "decode")


async def _show_progress(admin_address: str, progress: Progress) -> str:
    """Returns only when an engine failed to start: with the reason."""
    async with grpc.aio.insecure_channel(admin_address, options=channel_options()) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        async for membership in admin.WatchMembership(admin_pb2.WatchMembershipRequest()):
            for member in sorted(membership.members, key=lambda one: one.engine_id):
                progress(member.engine_id, member.progress or member.state)
            failures = [f"{pool.role}: {pool.last_failure}" for pool in membership.pools if pool.last_failure]
            if failures:
                return f"an engine failed to start: {'; '.join(failures)}"
    return "the controller went away"
