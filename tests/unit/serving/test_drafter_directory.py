"""Looking for drafters goes on beside the reports that use them; Ray's calls are stood in for here."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from dspark_ray.serving import drafter_directory
from dspark_ray.serving.drafter_directory import NAMESPACE, DrafterDirectory, engine_name


class Actors:
    """Ray's table of named actors: the ends of their names, and what each answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, asyncio.Future[str]] = {}
        self.away = False
        monkeypatch.setattr(ray.util, "list_named_actors", self.list)
        monkeypatch.setattr(ray, "get_actor", self.get)
        monkeypatch.setattr(drafter_directory, "LOOK_PERIOD_S", 0.0)

    def list(self, all_namespaces: bool) -> list[dict[str, str]]:
        if self.away:
            raise ray.exceptions.RaySystemError("the head is away")
        return [{"namespace": NAMESPACE, "name": name} for name in self.answers]

    def get(self, name: str, namespace: str) -> Any:
        async def endpoint() -> str:
            return await asyncio.shield(self.answers[name])

        return SimpleNamespace(endpoint=SimpleNamespace(remote=endpoint))


def loading(actors: Actors, replica: str) -> "asyncio.Future[str]":
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    actors.answers[engine_name("app", "m", replica) + ".1"] = future
    return future


async def eventually_listed(directory: DrafterDirectory, *replicas: str) -> None:
    for _ in range(500):
        if [route.replica for route in directory.routes()] == list(replicas):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(directory.routes())


async def test_a_drafter_that_still_loads_holds_up_neither_the_report_nor_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = Actors(monkeypatch)
    slow = loading(actors, "a")
    loading(actors, "b").set_result("tcp://b")
    directory = DrafterDirectory("app", "m")
    assert directory.routes() == (), "the first look has just begun"
    await eventually_listed(directory, "b")
    slow.set_result("tcp://a")
    await eventually_listed(directory, "a", "b")
    actors.answers.pop(engine_name("app", "m", "b.1"))
    await eventually_listed(directory, "a")


async def test_while_ray_does_not_answer_the_known_drafters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    actors, warnings = Actors(monkeypatch), []
    # Not caplog: libraries that other tests load switch off the loggers that they find.
    monkeypatch.setattr(drafter_directory.logger, "warning", lambda *said: warnings.append(said))
    loading(actors, "a").set_result("tcp://a")
    directory = DrafterDirectory("app", "m")
    await directory.look()
    actors.away = True
    for _ in range(3):
        await directory.look()
    assert len(warnings) == 1
    assert [route.endpoint for route in directory.routes()] == ["tcp://a"]
