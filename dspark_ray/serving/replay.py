"""Continuing an answer that another verifier began, at the seam between vLLM's engine client and its core.

The client side of vLLM (detokeniser, stop strings, logprobs, the OpenAI layer above) is given the request as it
came and, as if the engine had just made them, the tokens that are already there. The engine core gets another
one: they belong to its prompt, and count as generated where lengths and random draws are concerned.
"""

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.outputs import LogprobsLists

from dspark_ray.serving.continuation import EMITTED_KEY
from dspark_ray.target.seeding import DRAWS_KEY


def emitted_tokens(params: SamplingParams | None) -> list[int]:
    """The tokens that a request's answer begins with; none for an ordinary request."""
    extra = params.extra_args if params is not None else None
    return list((extra or {}).get(EMITTED_KEY, ()))


def remaining_request(request: EngineCoreRequest, emitted: Sequence[int]) -> EngineCoreRequest:
    """What the engine core still has to do.

    Args:
        request: as the client side knows it.
        emitted: the tokens that are there already.

    Raises:
        VLLMValidationError: it cannot be continued from tokens.
    """
    params = request.sampling_params
    if params is None or params.max_tokens is None or request.prompt_token_ids is None or request.mm_features:
        raise VLLMValidationError("only answers to text can be continued")
    if len(emitted) >= params.max_tokens:
        raise VLLMValidationError("the answer to be continued is complete")
    params = copy.copy(params)
    params.max_tokens -= len(emitted)
    params.min_tokens = max(0, params.min_tokens - len(emitted))
    extra: dict[str, Any] = {**(params.extra_args or {}), DRAWS_KEY: len(emitted)}
    del extra[EMITTED_KEY]
    params.extra_args = extra
    prompt = [*request.prompt_token_ids, *emitted]
    return msgspec.structs.replace(request, prompt_token_ids=prompt, sampling_params=params)


def emitted_output(request: EngineCoreRequest, emitted: Sequence[int]) -> EngineCoreOutput:
    """The engine output that brings the client side to where the answer was left.

    Its logprobs are placeholders, one a token: the reader of the repeated part has the real ones and drops these.
    """
    logprobs = None
    if request.sampling_params is not None and request.sampling_params.num_logprobs is not None:
        ids = np.asarray(emitted, dtype=np.int32)[:, None]  # [tokens, 1]
        logprobs = LogprobsLists(ids, np.zeros(ids.shape, np.float32), np.ones(len(emitted), np.int32))
    return EngineCoreOutput(request.request_id, list(emitted), new_logprobs=logprobs)
