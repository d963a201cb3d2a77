"""What every dspark_ray model runner adds to vLLM's, on CPU and GPU alike."""

from typing import Any

from dspark_ray.target.coupled_sampler import CoupledRejectionSampler
from dspark_ray.target.options import options_of
from dspark_ray.target.ratio_mend import mend_cpu_expansion
from dspark_ray.target.seeding import discarded_draws_given_back
from dspark_ray.target.slot_processors import install_carried_processors


class DSparkRunnerMixin:
    """Mixed in before vLLM's V1 model runner."""

    def __init__(self, vllm_config: Any, device: Any):
        super().__init__(vllm_config, device)
        self.dspark_options = options_of(vllm_config)
        if not self.is_pooling_model:
            install_carried_processors(self.input_batch.logitsprocs, vllm_config, device)
        if self.speculative_config is None:
            return
        if self.dspark_options.exactness == "coupled":
            self.rejection_sampler = CoupledRejectionSampler(self.sampler, self.speculative_config, device)
        elif device.type == "cpu":
            mend_cpu_expansion()

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        """Sample as vLLM does; requests whose token is discarded keep their generator as it was."""
        batch = self.input_batch
        with discarded_draws_given_back(batch.generators, self.discard_request_mask.np[: batch.num_reqs]):
            return super()._sample(logits, spec_decode_metadata)

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        """Hide the generators from vLLM's own way of giving draws back, which `_sample` has done already."""
        batch = self.input_batch
        generators, batch.generators = batch.generators, {}
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            batch.generators = generators
