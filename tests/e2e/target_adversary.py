"""A drafter that knows the answers, or lies: what the sampler must be immune to."""

import random
from typing import ClassVar

from vllm.v1.worker.cpu_model_runner import CPUModelRunner

import dspark_ray.target.cpu_worker as ours
from dspark_ray.target.cpu_worker import DSparkCPUModelRunner, DSparkCPUWorker

ORACLE: dict[
    int, list[int]
] = {}  # sampling_params.extra_args["twin"] -> output token ids without speculation


class Proposer:
    """Satisfies vLLM's custom_class; the drafting itself is in the runner below."""

    def __init__(self, vllm_config):
        pass

    def load_model(self, target_model):
        pass

    def propose(self, *args, **kwargs):
        raise NotImplementedError


class AdversarialRunner(DSparkCPUModelRunner):
    dice = random.Random(0)
    counts: ClassVar[dict[str, int]] = {"drafted": 0, "steps": 0}

    def propose_draft_token_ids(self, scheduler_output, sampled_token_ids, *args, **kwargs):
        return [
            self._drafts(request_id) if sampled else []
            for request_id, sampled in zip(self.input_batch.req_ids, sampled_token_ids, strict=True)
        ]

    def _drafts(self, request_id):
        request = self.requests[request_id]
        done = len(request.output_token_ids)
        truth = ORACLE.get(request.sampling_params.extra_args["twin"], [])[done : done + self.num_spec_tokens]
        length = self.dice.randint(0, self.num_spec_tokens)
        right = self.dice.randint(0, length)
        garbage = [self.dice.randrange(self.model_config.get_vocab_size()) for _ in range(length)]
        self.counts["drafted"] += length
        return (truth[:right] + garbage)[:length]


class AdversarialWorker(DSparkCPUWorker):
    def init_device(self):
        ours.DSparkCPUModelRunner = AdversarialRunner
        try:
            super().init_device()
        finally:
            ours.DSparkCPUModelRunner = DSparkCPUModelRunner


class LikelyRunner(AdversarialRunner):
    """Drafts what greedy decoding would say, wherever the request has got to."""

    def _drafts(self, request_id):
        request = self.requests[request_id]
        truth = ORACLE[request.sampling_params.extra_args["twin"]]
        return truth[len(request.output_token_ids) :][: self.num_spec_tokens]


class LikelyWorker(DSparkCPUWorker):
    def init_device(self):
        ours.DSparkCPUModelRunner = LikelyRunner
        try:
            super().init_device()
        finally:
            ours.DSparkCPUModelRunner = DSparkCPUModelRunner


assert issubclass(AdversarialRunner, CPUModelRunner)
