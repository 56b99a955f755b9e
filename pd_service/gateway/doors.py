"""The ports of a gateway, taken before anything slow starts: what cannot be had is said at once."""

from __future__ import annotations

import socket

import grpc

from pd_service.channels import door_options
from pd_service.config import GatewaySettings
from pd_service.errors import ConfigError


class Doors:
    """Both ports, bound. Needs the event loop the gateway will serve in. Raises ConfigError naming the address."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.http_socket = _bind(settings.http)
        self.http_address = "{}:{}".format(*self.http_socket.getsockname()[:2])
        self.grpc_server = grpc.aio.server(options=door_options())
        host, _, _ = settings.grpc.rpartition(":")
        try:
            port = self.grpc_server.add_insecure_port(settings.grpc)
        except RuntimeError as error:
            self.http_socket.close()
            raise ConfigError(f"gateway.grpc: cannot bind {settings.grpc}; is the port in use?") from error
        self.grpc_address = f"{host}:{port}"

    async def close(self) -> None:
        """Gives both ports back; open calls are cut. May be called twice."""
        self.http_socket.close()
        await self.grpc_server.stop(None)


def _bind(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"gateway.http: {address!r} is not host:port")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, int(port)))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(f"gateway.http: cannot bind {address}: {error}") from error
    return bound
