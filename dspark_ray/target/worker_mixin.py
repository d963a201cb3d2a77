"""What every dspark_ray worker adds to vLLM's: start-up of the shim, and the calls its replica makes."""

from pathlib import Path
from typing import Any

import msgspec
from vllm.distributed.parallel_state import get_tp_group

from dspark_ray.errors import ConfigError
from dspark_ray.protocol import TargetControl


class DSparkWorkerMixin:
    """Mixed in before a vLLM worker. Its ``dspark_*`` methods are for the engine's collective_rpc."""

    def compile_or_warm_up_model(self) -> Any:
        """Warm up as vLLM does, then profile the engine's steps and meet the drafter."""
        times = super().compile_or_warm_up_model()
        self.model_runner.start_dspark(talks=get_tp_group().rank_in_group == 0)
        return times

    def dspark_control(self, payload: bytes) -> None:
        """Change what may change at run time.

        Args:
            payload: a `TargetControl` in msgpack.

        Raises:
            msgspec.DecodeError: it is something else.
        """
        message = msgspec.msgpack.decode(payload, type=TargetControl)
        loop = self.model_runner.dspark_loop
        if loop is None:
            return
        loop.planner.control(message)
        if message.drafters is not None:
            loop.client.route(message.drafters)

    def dspark_swap(self, checkpoint: str) -> str | None:
        """Go on with another draft checkpoint; its client is to be told its drafters anew by `dspark_control`.

        Returns:
            Why that cannot be: then everything stays as it was.
        """
        try:
            self.model_runner.swap_drafter(Path(checkpoint), talks=get_tp_group().rank_in_group == 0)
        except ConfigError as error:
            return str(error)
        return None

    def dspark_stats(self) -> bytes | None:
        """The shim's counters in msgpack: {"shim": …, "client": …, "step": …}; None on ranks without any."""
        runner = self.model_runner
        if (loop := runner.dspark_loop) is not None:
            return msgspec.msgpack.encode(
                {
                    "shim": loop.stats.report(),
                    "client": loop.client.counters,
                    "step": {
                        "tokens": loop.profile.sizes,
                        "milliseconds": loop.profile.step_ms,
                        "observed": loop.profile.observed,
                    },
                    "mode": loop.planner.mode,
                    "tau": loop.planner.tau,
                    "requests": len(loop.contexts),
                }
            )
        if (side := runner.dspark_prefill) is not None:
            offers = side.offers
            return msgspec.msgpack.encode(
                {
                    "shim": side.stats.report(),
                    "handoffs": {
                        "waiting": len(offers),
                        "offered": offers.offered,
                        "fetched": offers.fetched,
                        "expired": offers.expired,
                    },
                    "requests": len(side.contexts),
                }
            )
        return None

    def dspark_handoff_endpoint(self) -> str | None:
        """Where a prefill worker's prompt features are fetched; None elsewhere."""
        side = self.model_runner.dspark_prefill
        return None if side is None else side.server.endpoint
