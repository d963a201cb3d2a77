"""Where a replica's own sockets listen: address, and ports that must be known before their process starts."""

import os
import socket

import ray

from dspark_ray.errors import ConfigError

LOOPBACK = "127.0.0.1"


def peer_host(secret_env: str) -> str:
    """The address for draft calls and prompt features: this node's, or without a secret the loopback one.

    Raises:
        ConfigError: without a secret on a cluster of several nodes, where replicas could not reach each other.
    """
    if os.environ.get(secret_env):
        return str(ray.util.get_node_ip_address())
    if sum(node["Alive"] for node in ray.nodes()) > 1:
        raise ConfigError(
            f"security.secret_env: {secret_env} is not set on this node, and the cluster has others: drafters and "
            "verifiers only talk over a network with the deployment's secret. Set it to the same value on every node"
        )
    return LOOPBACK


def free_port_range(count: int = 1) -> int:
    """First of ``count`` neighbouring TCP ports that are free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("", 0))
            first = probe.getsockname()[1]
        if first + count < 2**16 and all(_is_free(first + offset) for offset in range(count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
