"""When a draining replica must end its streams, so that Serve's kill does not cut them silently.

Serve tells a replica's code nothing when it starts to drain; it stops its health checks and kills the process
after ``graceful_shutdown_timeout_s``. The silence of the health checks is therefore the sign, as long as the
controller itself is there: one that is away checks nobody and kills nobody.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

MARGIN_S = 5.0
MISSED_CHECKS = 4
ANSWER_TIMEOUT_S = 2.0
"""Well below the margin: a drain goes on meanwhile."""
ASK_AGAIN_S = 10.0


def controller_probe() -> Callable[[], Awaitable[bool]]:
    """How a replica asks whether Serve's controller answers; found now, since it may be away when asked.

    Raises:
        ValueError: there is no controller.
    """
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)

    async def answers() -> bool:
        try:
            await asyncio.wait_for(controller.check_alive.remote(), ANSWER_TIMEOUT_S)
        except (TimeoutError, ray.exceptions.RayError):
            return False
        return True

    return answers


class DrainGuard:
    """Watches the controller's health checks.

    Args:
        grace_s: the deployment's graceful_shutdown_timeout_s.
        check_period_s: its health_check_period_s.
        controller_answers: whether the controller is there, said within a time well below `MARGIN_S`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        grace_s: float,
        check_period_s: float,
        controller_answers: Callable[[], Awaitable[bool]],
        clock: Callable[[], float] = time.monotonic,
    ):
        # A few late checks are no drain. A grace shorter than those cannot be guarded.
        self._silence_s = max(grace_s - MARGIN_S, MISSED_CHECKS * check_period_s)
        # Still alive well after the grace: then it was the controller that was away, not a drain.
        self._over_s = max(grace_s, self._silence_s) + 2 * MARGIN_S
        self._controller_answers = controller_answers
        self._asking = asyncio.Lock()
        self._clock = clock
        self._checked_s: float | None = None
        self._away = self._drains = False

    def checked(self) -> None:
        """The controller has just asked for this replica's health."""
        self._checked_s = self._clock()
        self._away = self._drains = False

    def remaining_s(self) -> float | None:
        """Seconds until `is_drain` must be asked, at most 0 when now; None while that is unknown."""
        if self._checked_s is None:
            return None
        silent_s = self._clock() - self._checked_s
        return None if silent_s > self._over_s else self._silence_s - silent_s

    async def is_drain(self) -> bool:
        """Whether streams must end now; if not, `remaining_s` says when to ask again."""
        async with self._asking:  # one stream asks for all
            if self._drains or not self._is_due():
                return self._drains
            answers = await self._controller_answers()
            if not self._is_due():
                return False  # checked meanwhile
            if not answers:
                self._away = True
                self._checked_s = self._clock() - self._silence_s + ASK_AGAIN_S
            elif self._away:
                # It has just come back. Its checks come again, or it drains this replica from now on.
                self.checked()
            else:
                self._drains = True
            return self._drains

    def _is_due(self) -> bool:
        remaining_s = self.remaining_s()
        return remaining_s is not None and remaining_s <= 0
