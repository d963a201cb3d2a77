"""Where a replica's own sockets listen: address, and ports that must be known before their process starts."""

import atexit
import contextlib
import os
import secrets
import socket
from pathlib import Path

import ray

from dspark_ray.errors import ConfigError

LOOPBACK = "127.0.0.1"
# No server of ours listens here, or on all addresses: what is bound here keeps nobody but other choosers away.
HOLD = "127.0.0.2"
ABOVE_RAYS_WORKERS = 20_000  # Ray's own workers take 10002 to 19999
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")

_held = contextlib.ExitStack()
atexit.register(_held.close)


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
    """First of ``count`` neighbouring TCP ports to listen at, held for this process against other callers.

    The listener may start half a minute later. So these are none of the ports that the kernel gives to outgoing
    connections: one of those was taken meanwhile, and vLLM waits for ever for its listener then.
    """
    candidates = listening_ports()
    while True:
        first = secrets.choice(candidates[: len(candidates) - count + 1])
        ports = range(first, first + count)
        with contextlib.suppress(OSError):
            _bind_all("", ports).close()
            _held.enter_context(_bind_all(HOLD, ports))
            return first


def listening_ports(outgoing: str | None = None) -> range:
    """Ports that neither the kernel nor Ray gives away: the longer of the two ranges beside the outgoing ones.

    Args:
        outgoing: First and last port of outgoing connections, as the kernel states them; read from it by default.
    """
    low, high = map(int, (outgoing or OUTGOING.read_text()).split())
    below, above = range(ABOVE_RAYS_WORKERS, low), range(high + 1, 2**16)
    return max(below, above, key=len) or range(ABOVE_RAYS_WORKERS, 2**16)


def _bind_all(host: str, ports: range) -> contextlib.ExitStack:
    with contextlib.ExitStack() as bound:
        for port in ports:
            bound.enter_context(socket.socket()).bind((host, port))
        return bound.pop_all()
