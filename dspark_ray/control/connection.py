"""Reaching Redis by one URL (a single server, TLS, AUTH, Sentinel, Cluster), and pauses between attempts."""

import random
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel

from dspark_ray.errors import ConfigError

SCHEMES = (
    "redis://, rediss:// (TLS), unix://, redis+cluster://host:port,host:port, "
    "redis+sentinel://host:port,host:port/service/db, and rediss+ for both"
)
Client = Any  # redis.Redis | RedisCluster; their annotations disagree on what every command returns


def client_factory(url: str, timeout_s: float) -> Callable[[], Client]:
    """How to make a client for a Redis URL. The URL is checked now; nothing is sent before the call.

    Every operation fails within `timeout_s`; nothing is retried below us, since the callers pause and try
    again with fresh data themselves.

    Args:
        url: see `SCHEMES`; user and password as usual in URLs, ``?ssl_ca_certs=`` and the like for TLS.
        timeout_s: longest wait for a connection or an answer.

    Raises:
        ConfigError: the URL cannot be understood. The message never contains it: it may hold a password.
    """
    scheme = url.partition("://")[0]
    options: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    try:
        if scheme in {"redis", "rediss", "unix"}:
            client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
            return lambda: client
        if scheme in {"redis+cluster", "rediss+cluster"}:
            return _cluster(url, options)
        if scheme in {"redis+sentinel", "rediss+sentinel"}:
            return _sentinel(url, options)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"Redis URL: cannot be understood ({type(error).__name__}); use {SCHEMES}"
        ) from None
    raise ConfigError(f"Redis URL: unknown scheme {scheme!r}; use {SCHEMES}")


def _hosts(netloc: str, default_port: int) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Credentials and the (host, port) pairs of ``user:password@host:port,host:port``."""
    credentials, _, hosts = netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    given = {"username": unquote(user), "password": unquote(password)}
    pairs = []
    for host in hosts.split(","):
        name, colon, port = host.rpartition(":")
        if not colon or port.endswith("]"):
            name, port = host, str(default_port)
        if not name:
            raise ValueError("a host is missing")
        pairs.append((name.strip("[]"), int(port)))
    return {key: value for key, value in given.items() if value}, pairs


def _query(query: str) -> dict[str, Any]:
    """Typed connection options of a URL's query."""
    parse: Any = parse_url  # unannotated
    options: dict[str, Any] = dict(parse(f"redis://placeholder?{query}"))
    options.pop("host")
    return options


def _cluster(url: str, options: dict[str, Any]) -> Callable[[], Client]:
    parts = urlsplit(url)
    credentials, hosts = _hosts(parts.netloc, 6379)
    options = {"ssl": parts.scheme.startswith("rediss"), **_query(parts.query), **credentials, **options}
    node: Any = ClusterNode  # unannotated
    return lambda: RedisCluster(startup_nodes=[node(host, port) for host, port in hosts], **options)


def _sentinel(url: str, options: dict[str, Any]) -> Callable[[], Client]:
    parts = urlsplit(url)
    credentials, hosts = _hosts(parts.netloc, 26379)
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ConfigError(
            "Redis URL: redis+sentinel:// needs the service name as its path, such as /mymaster"
        )
    if parts.scheme.startswith("rediss"):
        options = {"ssl": True, **options}
    sentinel: Any = Sentinel  # unannotated
    master = {"db": int(database or 0), **_query(parts.query), **credentials, **options}
    return lambda: sentinel(hosts, sentinel_kwargs=options).master_for(
        service, retry=Retry(NoBackoff(), 0), **master
    )


class Backoff:
    """Growing, jittered pauses between attempts, so that a fleet does not return to a store in step."""

    def __init__(self, first_s: float, longest_s: float, rng: random.Random) -> None:
        """Pauses of up to `first_s`, doubling up to `longest_s`."""
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failed attempts since the last success."""
        return self._failures

    def failed(self) -> float:
        """Seconds to wait after one more failure."""
        ceiling = min(self._longest_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return ceiling * (0.5 + 0.5 * self._rng.random())

    def succeeded(self) -> None:
        """Forget past failures."""
        self._failures = 0
