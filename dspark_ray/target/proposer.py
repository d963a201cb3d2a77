"""The class that vLLM's ``method: custom_class`` asks for. The drafting itself is in the runner's hook.

vLLM's own call of a custom proposer carries no hidden states, so the runner overrides
`propose_draft_token_ids` and this object only satisfies the interface.
"""

from typing import Any


class DSparkProposer:
    """Named by ``speculative_config.model``."""

    def __init__(self, vllm_config: Any):
        """Nothing to do: the runner reads the configuration."""

    def load_model(self, target_model: Any) -> None:
        """Nothing to do: the runner loads the drafter once its own model is there."""

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:  # noqa: ARG002
        """Never drafts.

        Raises:
            RuntimeError: the engine runs without our worker class.
        """
        raise RuntimeError(
            "DSparkProposer needs worker_cls dspark_ray.target.cpu_worker.DSparkCPUWorker (or gpu)"
        )
