"""Ports of listeners that start later than they are chosen."""

import socket

import pytest

from dspark_ray.serving import ports


@pytest.mark.parametrize(
    ("outgoing", "listening"),
    [
        ("32768\t60999\n", range(20_000, 32_768)),
        ("15000 30000", range(30_001, 65_536)),
        ("1024 65535", range(20_000, 65_536)),
    ],
)
def test_ports_of_outgoing_connections_are_left_alone(outgoing: str, listening: range) -> None:
    assert ports.listening_ports(outgoing) == listening


def test_chosen_ports_are_neighbours_of_that_range() -> None:
    first = ports.free_port_range(3)
    assert {first, first + 2} <= set(ports.listening_ports())


def test_a_port_is_given_once_and_its_owner_can_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas that start together would else meet at one port, long after either looked."""
    given = ports.free_port_range()
    other = given + 1 if given + 1 in ports.listening_ports() else given - 1
    offered = iter([given, other])
    monkeypatch.setattr(ports.secrets, "choice", lambda _: next(offered))
    assert ports.free_port_range() == other
    with socket.create_server((ports.LOOPBACK, given)):
        pass
