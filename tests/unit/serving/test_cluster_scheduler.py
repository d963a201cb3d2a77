"""A restarted scheduler is told what is in force, and one that runs moves to another Redis; no Ray here."""

import time
from collections.abc import Awaitable, Iterator
from typing import Any

import pytest
import ray

from dspark_ray.config import ControlConfig, TelemetryConfig
from dspark_ray.serving import cluster_scheduler
from dspark_ray.serving.cluster_scheduler import ClusterScheduler, watch_cluster_scheduler

CONTROL = ControlConfig(tick_interval_s=0.05, lease_lifetime_s=0.5)
TELEMETRY = TelemetryConfig(key_prefix="moved", timeout_s=0.2, backoff_max_s=0.1)
NOWHERE = "redis://127.0.0.1:1"


class Handle:
    """A handle of an actor that answers with one entry after the other, or raises it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.told: list[tuple[Any, ...]] = []
        self.alive = self.configure = self

    def remote(self, *settings: Any) -> Awaitable[Any] | None:
        if settings:
            self.told.append(settings)
            return None

        async def answer() -> Any:
            found = self._answers.pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        return answer()


async def test_a_scheduler_that_was_started_anew_is_told_the_settings_in_force_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_scheduler, "WATCH_PERIOD_S", 0.001)
    monkeypatch.setenv(TELEMETRY.redis_url_env, NOWHERE)
    gone = ray.exceptions.RayActorError()
    handle = Handle(("a", 0.0), ("a", 0.0), gone, ("b", 0.0), ("b", 0.0), EOFError())
    bounds = iter([CONTROL, CONTROL.model_copy(update={"tau_min": 0.4})])
    with pytest.raises(EOFError):
        await watch_cluster_scheduler(handle, lambda: next(bounds), TELEMETRY)
    assert [control["tau_min"] for control, *_ in handle.told] == [CONTROL.tau_min, 0.4]
    assert [rest for _, *rest in handle.told] == [[TELEMETRY.model_dump(), NOWHERE]] * 2


@pytest.fixture
def scheduler() -> Iterator[ClusterScheduler]:
    scheduler = ClusterScheduler(CONTROL.model_dump(), TELEMETRY.model_dump(), NOWHERE)
    yield scheduler
    scheduler.stop()


def test_changed_telemetry_moves_a_running_scheduler_and_the_same_again_does_not(
    scheduler: ClusterScheduler, redis_url: str
) -> None:
    def rules() -> bool:
        return bool(scheduler.status()["ruling"])

    assert not rules()
    owner, _ = scheduler.alive()
    bounds = CONTROL.model_copy(update={"tau_min": 0.4}).model_dump()
    scheduler.configure(bounds, TELEMETRY.model_dump(), redis_url)
    deadline_s = time.monotonic() + 10
    while not rules():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    scheduler.configure(bounds, TELEMETRY.model_dump(), redis_url)
    assert rules(), "nothing has changed"
    assert scheduler._brain.control.tau_min == 0.4
    assert scheduler.alive()[0] == owner
