"""Where a model's drafters are, without Redis: their actors' names, kept by Ray.

With Redis the cluster scheduler's policy names them, with weights; this is what a verifier uses until the
first policy has come, and where there is no Redis.
"""

import asyncio
import time

import ray

from dspark_ray.protocol import DrafterRoute

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

    async def routes(self) -> tuple[DrafterRoute, ...]:
        """All drafters that run, equally weighted, in the order of their names; at most a second old.

        An actor that does not answer is left out, and asked again the next time.
        """
        if time.monotonic() - self._looked_s < LOOK_PERIOD_S:
            return self._routes()
        self._looked_s = time.monotonic()
        entries = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        names = {
            e["name"] for e in entries if e["namespace"] == NAMESPACE and e["name"].startswith(self._prefix)
        }
        self._known = {name: route for name, route in self._known.items() if name in names}
        for name in sorted(names - self._known.keys()):
            try:
                engine = ray.get_actor(name, NAMESPACE)
                endpoint = await asyncio.wait_for(engine.endpoint.remote(), ENDPOINT_TIMEOUT_S)
            except (TimeoutError, ValueError, ray.exceptions.RayError):
                continue
            replica = name.removeprefix(self._prefix).partition(".")[0]
            self._known[name] = DrafterRoute(replica, endpoint, 1.0)
        return self._routes()

    def _routes(self) -> tuple[DrafterRoute, ...]:
        return tuple(self._known[name] for name in sorted(self._known))
