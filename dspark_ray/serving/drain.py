"""When a draining replica must end its streams, so that Serve's kill does not cut them silently.

Serve tells a replica's code nothing when it starts to drain; it stops its health checks and kills the process
after ``graceful_shutdown_timeout_s``. The silence of the health checks is therefore the sign.
"""

import time
from collections.abc import Callable

MARGIN_S = 5.0
MISSED_CHECKS = 4


class DrainGuard:
    """Watches the controller's health checks.

    Args:
        grace_s: the deployment's graceful_shutdown_timeout_s.
        check_period_s: its health_check_period_s.
        clock: monotonic seconds.
    """

    def __init__(self, grace_s: float, check_period_s: float, clock: Callable[[], float] = time.monotonic):
        # A few late checks are no drain. A grace shorter than those cannot be guarded.
        self._silence_s = max(grace_s - MARGIN_S, MISSED_CHECKS * check_period_s)
        # Still alive well after the grace: then it was the controller that was away, not a drain.
        self._over_s = max(grace_s, self._silence_s) + 2 * MARGIN_S
        self._clock = clock
        self._checked_s: float | None = None

    def checked(self) -> None:
        """The controller has just asked for this replica's health."""
        self._checked_s = self._clock()

    def remaining_s(self) -> float | None:
        """Seconds until streams must end, at most 0 when they must end now; None while that is unknown."""
        if self._checked_s is None:
            return None
        silent_s = self._clock() - self._checked_s
        return None if silent_s > self._over_s else self._silence_s - silent_s
