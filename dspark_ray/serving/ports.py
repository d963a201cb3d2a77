"""Free TCP ports, for sockets whose number must be known before the process that binds them starts."""

import socket


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
