"""How loaded a replica is, as one number in [0, 1] (spec section 4), and how that number is smoothed."""

import math
from typing import NamedTuple

from dspark_ray.config import ControlConfig
from dspark_ray.protocol import LoadSample


def guide_load(
    waiting_requests: float,
    waiting_max_requests: float,
    memory_share: float,
    queue_weight: float = 0.6,
    memory_weight: float = 0.4,
) -> float:
    """The guide's load: ``0.6·(Q/Q_max) + 0.4·(M/M_max)``, each term clipped to [0, 1].

    Args:
        waiting_requests: Q, requests that wait, in Serve and in the engine's own queue.
        waiting_max_requests: Q_max, at which the term saturates.
        memory_share: M/M_max, KV blocks in use over all of them. Device memory says nothing: vLLM reserves it
            up front.
        queue_weight: weight of the first term.
        memory_weight: weight of the second term.

    Returns:
        Load in [0, 1].
    """
    queue = waiting_requests / waiting_max_requests
    return queue_weight * _clipped(queue) + memory_weight * _clipped(memory_share)


def _clipped(share: float) -> float:
    return 0.0 if share < 0.0 else min(share, 1.0)


def replica_load(sample: LoadSample, control: ControlConfig, queued_in_serve: float = 0.0) -> float:
    """Load of the replica that sent a sample.

    Args:
        sample: the replica's latest report.
        control: weights and the queue length at which the queue term saturates.
        queued_in_serve: the replica's part of the requests that no replica of the model has accepted yet.

    Returns:
        Load in [0, 1].
    """
    return guide_load(
        sample.requests_waiting + sample.requests_queued + queued_in_serve,
        control.queue_max_requests,
        sample.kv_blocks_used / sample.kv_blocks_total if sample.kv_blocks_total else 0.0,
        control.queue_weight,
        control.memory_weight,
    )


def blended_load(own: float, mean_of_model: float, cluster_weight: float) -> float:
    """A replica's own load blended with the mean over the replicas of its model, all in [0, 1].

    The mean is the model's, not the whole cluster's, so that an idle model keeps verifying long prefixes
    while its neighbour is saturated.
    """
    return (1.0 - cluster_weight) * own + cluster_weight * mean_of_model


class SmoothedLoad(NamedTuple):
    """A load that rises fast, falls slowly, and ignores small falls.

    Both stages are monotone in their input and in their state, so more load never gives less smoothed load.
    Rises are followed exactly (saturation is reached); falls only once they exceed a share of the value, so
    the result does not flap, and it returns to 0 with its input.
    """

    followed: float
    """The load after the two time constants."""
    held: float
    """What is acted upon: followed, with the hysteresis on the way down."""

    @classmethod
    def starting_at(cls, load: float) -> "SmoothedLoad":
        """The state of a replica that is seen for the first time."""
        return cls(load, load)

    def step(self, load: float, elapsed_s: float, control: ControlConfig) -> "SmoothedLoad":
        """The state after `elapsed_s` more seconds at `load`."""
        followed, held = self
        constant_s = control.load_rise_s if load > followed else control.load_fall_s
        gain = 1.0 - math.exp(-elapsed_s / constant_s) if constant_s > 0 else 1.0
        followed += gain * (load - followed)
        ceiling = followed * (1.0 + control.load_hysteresis)
        held = followed if held < followed else min(held, ceiling, 1.0)
        return SmoothedLoad(followed, held)
