"""Where a model's drafters are, without Redis: their actors' names, kept by Ray.

With Redis the cluster scheduler's policy names them, with weights; this is what a verifier uses until the
first policy has come, and where there is no Redis.
"""

import asyncio
import logging
import time

import ray

from dspark_ray.protocol import DrafterRoute

logger = logging.getLogger(__name__)
NAMESPACE = "dspark"
ENDPOINT_TIMEOUT_S = 5.0
LOOK_PERIOD_S = 1.0


def engine_name(app: str, model: str, replica: str) -> str:
    """How the name of a replica's drafting actor in namespace ``dspark`` begins; ``.1``, ``.2`` and so on follow."""
    return f"drafter:{app}:{model}:{replica}"


class DrafterDirectory:
    """The drafters of one model of one application.

    Args:
        app: the Serve application.
        model: model id.
    """

    def __init__(self, app: str, model: str):
        self._prefix = engine_name(app, model, "")
        self._known: dict[str, DrafterRoute] = {}
        self._looked_s = float("-inf")
        self._looking: asyncio.Task[None] | None = None
        self._listed = True

    def routes(self) -> tuple[DrafterRoute, ...]:
        """The drafters known so far, equally weighted, in the order of their names; never waits.

        Each call has the running event loop look anew, at most once a second and one look at a time.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_PERIOD_S and (self._looking is None or self._looking.done()):
            self._looked_s = now_s
            self._looking = asyncio.create_task(self.look())
        return tuple(self._known[name] for name in sorted(self._known))

    async def look(self) -> None:
        """Find out which drafters run.

        One that does not answer, as while it loads, is left out and asked again by the next look.
        """
        try:
            entries = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
            names = {
                e["name"]
                for e in entries
                if e["namespace"] == NAMESPACE and e["name"].startswith(self._prefix)
            }
            self._known = {name: route for name, route in self._known.items() if name in names}
            await asyncio.gather(*(self._ask(name) for name in names - self._known.keys()))
            self._listed = True
        except Exception as error:  # whatever it is, those known so far stay
            if self._listed:
                logger.warning("drafters cannot be listed: %s", error)
            self._listed = False

    async def _ask(self, name: str) -> None:
        try:
            engine = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            endpoint = await asyncio.wait_for(engine.endpoint.remote(), ENDPOINT_TIMEOUT_S)
        except (TimeoutError, ValueError, ray.exceptions.RayError):
            return
        replica = name.removeprefix(self._prefix).partition(".")[0]
        self._known[name] = DrafterRoute(replica, endpoint, 1.0)
