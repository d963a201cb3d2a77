"""What the ingress tells the control plane: how many requests of each model it holds."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dspark_ray.config import AppConfig
from dspark_ray.control.agent import ActivePolicy
from dspark_ray.protocol import LoadSample, RoundRecord
from dspark_ray.serving.cluster_scheduler import ensure_cluster_scheduler
from dspark_ray.serving.telemetry import Collect, ReplicaIdentity, report_forever, start_agent


class IngressReports:
    """Reports for each model until the replica ends, and sees to it that the cluster scheduler runs.

    What the ingress holds and no verifier has accepted yet waits in Serve: nobody else can count that.

    Args:
        config: of the application.
    """

    def __init__(self, config: AppConfig):
        self._scheduler = ensure_cluster_scheduler(config.control, config.telemetry)
        self._held: Counter[str] = Counter()
        self._tasks = [
            asyncio.create_task(
                report_forever(
                    start_agent(config.control, config.telemetry),
                    self._collector(model.id),
                    config.telemetry.sample_interval_s,
                )
            )
            for model in config.models
        ]

    @contextmanager
    def holding(self, model: str) -> Iterator[None]:
        """Count a request of `model` while the block runs."""
        self._held[model] += 1
        try:
            yield
        finally:
            self._held[model] -= 1

    @property
    def held(self) -> int:
        """Requests of all models in hand."""
        return self._held.total()

    def _collector(self, model: str) -> Collect:
        identity = ReplicaIdentity.of_this_replica("ingress", model)

        async def collect(_: ActivePolicy) -> tuple[LoadSample, Sequence[RoundRecord]]:
            return identity.sample(requests_running=self._held[model]), ()

        return collect
