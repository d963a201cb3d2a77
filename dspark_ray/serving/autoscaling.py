"""The application-level autoscaling policy: prefill, drafter and verifier of each model sized together.

In a Serve config file, beside ``args``::

    autoscaling_policy:
      policy_function: dspark_ray.serving.autoscaling:RoleSizer
      policy_kwargs: {target_ttft_s: 2.0}        # an AutoscalingTargets

Serve calls it in its controller ten times a second and applies each deployment's own bounds and delays to the
result. It never waits: a thread fetches telemetry from the cluster scheduler once a second.
"""

import logging
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import ray

from dspark_ray.config import AutoscalingTargets, TelemetryConfig
from dspark_ray.control.autoscaling import RoleSize, RoleTelemetry, size_model
from dspark_ray.protocol import Role, SizingDecision

ROLE_OF_PREFIX: dict[str, Role] = {"Prefill": "prefill", "Drafter": "drafter", "Verifier": "verifier"}
"""Deployments are named ``<prefix>:<model>``."""
POLL_INTERVAL_S = 1.0
STALE_AFTER_S = 10.0
CALL_TIMEOUT_S = 2.0


class RoleSizer:
    """Ray Serve's application-level policy, called as ``policy(contexts) -> (replicas, state)``.

    Args:
        key_prefix: the application's ``telemetry.key_prefix``, which names its scheduler.
        targets: fields of `AutoscalingTargets`.

    Raises:
        ValidationError: an unknown or impossible target.
    """

    def __init__(self, key_prefix: str = TelemetryConfig().key_prefix, **targets: Any) -> None:
        """Fetches nothing before the first call."""
        self._key_prefix = key_prefix
        self._targets = AutoscalingTargets.model_validate(targets)
        self._telemetry: dict[str, RoleTelemetry] = {}
        self._tau_max: float | None = None
        self._fetched_at_s = float("-inf")
        self.decisions: dict[str, SizingDecision] = {}
        self._thread: threading.Thread | None = None

    def __call__(self, contexts: Mapping[Any, Any]) -> tuple[dict[Any, int], dict[Any, dict[str, Any]]]:
        """Replicas wanted for each autoscaled deployment of the application.

        Args:
            contexts: Serve's AutoscalingContext by DeploymentID.
        """
        self._ensure_thread()
        fresh = time.monotonic() - self._fetched_at_s <= STALE_AFTER_S
        telemetry = self._telemetry if fresh else {}
        models: dict[str, dict[Role, Any]] = defaultdict(dict)
        for deployment_id in contexts:
            prefix, _, model = deployment_id.name.partition(":")
            if prefix in ROLE_OF_PREFIX:
                models[model][ROLE_OF_PREFIX[prefix]] = deployment_id
        wanted: dict[Any, int] = {}
        decisions: dict[str, SizingDecision] = {}
        for model, ids in models.items():
            sizes = {role: _size(contexts[i], telemetry.get(i.name)) for role, i in ids.items()}
            # Serve has no context for deployments of a fixed size.
            verifiers = telemetry.get(f"Verifier:{model}")
            for role, decision in size_model(model, sizes, self._targets, self._tau_max, verifiers).items():
                wanted[ids[role]] = decision.wanted
                decisions[ids[role].name] = decision
        self.decisions = decisions
        return wanted, {}

    def take(self, telemetry: dict[str, RoleTelemetry], tau_max: float | None) -> None:
        """Take in what the scheduler said; an empty answer is none."""
        if telemetry:
            self._telemetry, self._tau_max = telemetry, tau_max
            self._fetched_at_s = time.monotonic()

    def _ensure_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=_poll, args=(weakref.ref(self), self._key_prefix), name="dspark-sizing", daemon=True
            )
            self._thread.start()


def _size(context: Any, telemetry: RoleTelemetry | None) -> RoleSize:
    return RoleSize(
        target=context.target_num_replicas,
        serve_requests=float(context.total_num_requests),
        telemetry=telemetry or RoleTelemetry(),
        serve_target=float(context.config.get_target_ongoing_requests()),
    )


def _poll(sizer_ref: "weakref.ref[RoleSizer]", key_prefix: str) -> None:
    """Exchange decisions for telemetry until the policy is replaced."""
    # Imported here, since Serve ships this module by value and its controller needs none of it to start.
    from dspark_ray.serving.cluster_scheduler import NAMESPACE, scheduler_name

    logger = logging.getLogger("ray.serve")
    name = scheduler_name(TelemetryConfig(key_prefix=key_prefix))
    reachable = True
    while (sizer := sizer_ref()) is not None:
        try:
            scheduler = ray.get_actor(name, NAMESPACE)
            answer = ray.get(scheduler.exchange_sizing.remote(sizer.decisions), timeout=CALL_TIMEOUT_S)
            sizer.take(*answer)
            reachable = True
        except (ValueError, ray.exceptions.RayError) as error:
            if reachable:
                logger.warning("autoscaling: the cluster scheduler does not answer: %s", error)
            reachable = False
        del sizer
        time.sleep(POLL_INTERVAL_S)
