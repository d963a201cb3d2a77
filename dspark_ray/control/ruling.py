"""How a scheduler rules: acquire the lease, rebuild, then read, decide, publish, until another one rules."""

from collections.abc import Callable

from dspark_ray.control.brain import ClusterBrain, Decisions
from dspark_ray.control.telemetry import Lease, TelemetryStore


class Ruler:
    """One scheduler among possibly several. Only the one that holds the lease publishes.

    Every method may raise one of `telemetry.STORE_ERRORS`; the next `step` goes on from there.
    """

    def __init__(
        self, store: TelemetryStore, brain: ClusterBrain, owner: str, clock: Callable[[], float]
    ) -> None:
        """A scheduler that does not rule yet.

        Args:
            store: where samples come from and policies go to.
            brain: decides.
            owner: unique for each start of a scheduler.
            clock: monotonic seconds.
        """
        self._store = store
        self._brain = brain
        self._owner = owner
        self._clock = clock
        self._lease: Lease | None = None

    @property
    def ruling(self) -> bool:
        """Whether the lease was ours at the last step."""
        return self._lease is not None

    @property
    def lease(self) -> Lease | None:
        """The lease, if it was ours at the last step."""
        return self._lease

    def step(self) -> Decisions | None:
        """Rule once.

        Returns:
            What was decided and published; None while another scheduler rules.
        """
        if self._lease is None:
            lease = self._store.acquire(self._owner, self._brain.epoch)
            if lease is None:
                return None
            self._brain.rule(lease.epoch, self._store.policies())
            self._lease = lease
        decisions = self._brain.tick(self._store.samples(), self._clock())
        if self._store.publish(self._lease, decisions.policies, decisions.routes, decisions.dead):
            return decisions
        self._lease = None
        return None

    def resign(self) -> None:
        """Give the lease back."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._store.release(lease)
