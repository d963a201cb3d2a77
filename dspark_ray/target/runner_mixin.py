"""What every dspark_ray model runner adds to vLLM's, on CPU and GPU alike.

Always: seeded requests survive discarded draws, logit_bias and min_p travel in extra_args. With a drafter: hidden
states are tapped, and the draft loop runs where vLLM would call its own drafter.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dspark_ray.errors import ConfigError
from dspark_ray.target.assemble import (
    PrefillSide,
    Tap,
    build_prefill,
    build_verifier,
    plan,
    profile_engine,
    replace_prefill,
    replace_verifier,
)
from dspark_ray.target.context import StartedRequest, StepRow
from dspark_ray.target.coupled_sampler import CoupledRejectionSampler
from dspark_ray.target.draft_loop import DraftLoop
from dspark_ray.target.options import options_of
from dspark_ray.target.ratio_mend import mend_cpu_expansion
from dspark_ray.target.seeding import DRAWS_KEY, advance, discarded_draws_given_back
from dspark_ray.target.slot_processors import install_carried_processors

# A pause longer than this between two steps is an idle engine, not overhead of a step.
_IDLE_S = 0.05


class DSparkRunnerMixin:
    """Mixed in before vLLM's V1 model runner."""

    def __init__(self, vllm_config: Any, device: Any):
        super().__init__(vllm_config, device)
        options = options_of(vllm_config)
        self.dspark_blueprint = plan(options, vllm_config)
        self.dspark_loop: DraftLoop | None = None
        self.dspark_prefill: PrefillSide | None = None
        self._dspark_tap: Tap | None = None
        self._step_began = self._step_ended = 0.0
        if not self.is_pooling_model:
            install_carried_processors(self.input_batch.logitsprocs, vllm_config, device)
        if self.dspark_blueprint is not None:
            self.use_aux_hidden_state_outputs = True
        if self.speculative_config is None:
            return
        if options.exactness == "coupled":
            self.rejection_sampler = CoupledRejectionSampler(self.sampler, self.speculative_config, device)
        elif device.type == "cpu":
            mend_cpu_expansion()

    # --- start-up ------------------------------------------------------------------------------------------

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Load the target; it must be able to show its hidden states."""
        try:
            super().load_model(load_dummy_weights)
        except RuntimeError as error:
            if self.dspark_blueprint is None or "aux_hidden_state" not in str(error):
                raise
            raise ConfigError(
                f"{self.model_config.model}: vLLM cannot tap the hidden states of this architecture "
                f"({error}); set drafter.placement to none"
            ) from error

    def _get_eagle3_aux_layers_from_config(self) -> tuple[int, ...] | None:
        if self.dspark_blueprint is None:
            return super()._get_eagle3_aux_layers_from_config()
        return self.dspark_blueprint.aux_layers

    def start_dspark(self, *, talks: bool) -> None:
        """Profile the engine and build the draft loop, once KV cache and model are there.

        Args:
            talks: whether this rank drafts or hands features over; the other tensor-parallel ranks do not.
        """
        blueprint = self.dspark_blueprint
        if blueprint is None:
            return
        if blueprint.options.placement == "prefill":
            if talks:
                self._dspark_tap = Tap(blueprint, self.dtype, self.device)
                self.dspark_prefill = build_prefill(blueprint, self.vllm_config)
            return
        most = min(self.max_num_tokens, self.max_num_reqs * (1 + self.num_spec_tokens))
        profile = profile_engine(self._run_profiled_step, most, time.perf_counter)  # all ranks take part
        if talks:
            self._dspark_tap = Tap(blueprint, self.dtype, self.device)
            self.dspark_loop = build_verifier(blueprint, self.vllm_config, profile, self.device)

    def swap_drafter(self, checkpoint: Path, *, talks: bool) -> None:
        """Draft with another checkpoint from the next step on. Running requests begin their context anew.

        Args:
            checkpoint: folder of a draft that taps the same layers.
            talks: whether this rank drafts or hands features over.

        Raises:
            ConfigError: this engine cannot use it; nothing has changed then.
        """
        old = self.dspark_blueprint
        if old is None:
            raise ConfigError("this engine has no drafter that could be replaced")
        blueprint = plan(old.options.model_copy(update={"checkpoint": checkpoint}), self.vllm_config)
        if blueprint.aux_layers != old.aux_layers:
            raise ConfigError(
                f"{checkpoint}: taps layers {list(blueprint.draft.target_layer_ids)}, the running engine was started "
                f"for {list(old.draft.target_layer_ids)}: change drafter.source under args instead"
            )
        if talks:
            tap = Tap(blueprint, self.dtype, self.device)
            if self.dspark_prefill is not None:
                self.dspark_prefill = replace_prefill(self.dspark_prefill, blueprint, self.vllm_config)
            elif self.dspark_loop is not None:
                self.dspark_loop = replace_verifier(
                    self.dspark_loop, blueprint, self.vllm_config, self.device
                )
            self._dspark_tap = tap
        self.dspark_blueprint = blueprint

    @torch.inference_mode()
    def _run_profiled_step(self, tokens: int) -> None:
        """A forward pass and the logits of all its rows, as a verify pass has them."""
        hidden, _ = self._dummy_run(tokens)
        self.model.compute_logits(hidden[:tokens]).argmax(dim=-1)
        self._sync_device()

    # --- sampling ------------------------------------------------------------------------------------------

    def _update_states(self, scheduler_output: Any) -> Any:
        """Take requests in as vLLM does; the generator of one that another engine began goes on where it was."""
        corrections = super()._update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            generator = self.requests[new.req_id].generator
            if generator is not None and (draws := (new.sampling_params.extra_args or {}).get(DRAWS_KEY)):
                noise = torch.float64 if self.sampler.use_fp64_gumbel else torch.float32
                advance(generator, draws, self.model_config.get_vocab_size(), noise)
        return corrections

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

    # --- the step ------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        """Take note of requests that come and go, then run the step."""
        contexts = self._dspark_contexts
        if contexts is not None:
            idle = scheduler_output.total_num_scheduled_tokens == 0
            if self.dspark_loop is not None:
                self.dspark_loop.finish(list(scheduler_output.finished_req_ids), flush=idle)
            else:
                contexts.finish(scheduler_output.finished_req_ids)
            contexts.start([_started(new) for new in scheduler_output.scheduled_new_reqs])
        self._step_began = time.perf_counter()
        return super().execute_model(scheduler_output, intermediate_tensors)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """On a prefill worker: keep the features of the step. Elsewhere vLLM's own."""
        state = self.execute_model_state
        output = super().sample_tokens(grammar_output)
        if self.dspark_prefill is not None and state is not None:
            rows, index = self._step_rows(state.scheduler_output, None)
            features = self._dspark_tap.features(state.aux_hidden_states, index)
            self.dspark_prefill.contexts.advance(rows, features)
        return output

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Drafts are trimmed request by request; one that is near its end silences no neighbour."""
        if self.dspark_blueprint is None:
            return super()._input_fits_in_drafter(common_attn_metadata)
        return common_attn_metadata is not None

    def propose_draft_token_ids(
        self, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Where vLLM calls its drafter: hand the step over to the draft loop."""
        if self.dspark_blueprint is None:
            return super().propose_draft_token_ids(scheduler_output, sampled_token_ids, *args, **kwargs)
        if self.dspark_loop is None:
            return [[] for _ in sampled_token_ids]
        aux_hidden_states = kwargs["aux_hidden_states"] if "aux_hidden_states" in kwargs else args[3]
        loop, began = self.dspark_loop, time.perf_counter()
        scheduled = scheduler_output.num_scheduled_tokens
        self._note_step_time(loop, scheduler_output.total_num_scheduled_tokens, len(scheduled), began)
        rows, index = self._step_rows(scheduler_output, sampled_token_ids)
        features = self._dspark_tap.features(aux_hidden_states, index)
        loop.stats.feature_ms += (time.perf_counter() - began) * 1e3
        drafts = loop.step(rows, features)
        self._step_ended = time.perf_counter()
        return drafts

    def _note_step_time(self, loop: DraftLoop, tokens: int, requests: int, now: float) -> None:
        """Tell profile and statistics what the verify pass of this step took, overhead around it included."""
        between = self._step_began - self._step_ended
        between = between if between < _IDLE_S else 0.0
        loop.stats.verify_ms += (now - self._step_began) * 1e3
        loop.stats.between_ms += between * 1e3
        loop.profile.observe_step(tokens, (now - self._step_began + between) * 1e3, plain=tokens == requests)

    def _step_rows(
        self, scheduler_output: Any, sampled: list[list[int]] | None
    ) -> tuple[list[StepRow], torch.Tensor | None]:
        """What each request of the batch did, and which hidden-state rows are valid (None: all).

        Args:
            scheduler_output: of the step.
            sampled: tokens emitted for each request; None on a prefill worker, which needs only to know whether
                the prompt is complete.
        """
        batch, rows, index, first = self.input_batch, [], [], 0
        complete = True
        for i, key in enumerate(batch.req_ids):
            scheduled = scheduler_output.num_scheduled_tokens[key]
            drafted = len(scheduler_output.scheduled_spec_decode_tokens.get(key, ()))
            done = not self.discard_request_mask.np[i] if sampled is None else bool(sampled[i])
            accepted = len(sampled[i]) - 1 if sampled is not None and done else 0
            valid = scheduled - drafted + accepted
            index.append(np.arange(first, first + valid))
            complete &= valid == scheduled
            first += scheduled
            tokens = batch.token_ids_cpu[i, : batch.num_tokens_no_spec[i]]
            request = self.requests[key]
            rows.append(
                StepRow(
                    key=key,
                    position=int(batch.num_computed_tokens_cpu[i]),
                    rows=valid,
                    tokens=tokens,
                    anchor_token_id=int(tokens[-1]) if done else None,
                    room=self._room(request, sampled[i]) if sampled is not None and done else 0,
                    temperature=request.sampling_params.temperature,
                    verified=drafted,
                    accepted=accepted,
                )
            )
        if complete and first == scheduler_output.total_num_scheduled_tokens and self.device.type == "cpu":
            return rows, None
        return rows, torch.from_numpy(np.concatenate(index)).to(self.device)

    def _room(self, request: Any, sampled: list[int]) -> int:
        """Drafts that could still be verified: context end, tokens left, and none once it has stopped."""
        params = request.sampling_params
        if not params.all_stop_token_ids.isdisjoint(sampled):
            return 0
        room = self.max_model_len - request.num_tokens
        if params.max_tokens is not None:
            room = min(room, params.max_tokens - len(request.output_token_ids) - 1)
        return max(0, room)

    @property
    def _dspark_contexts(self) -> Any:
        side = self.dspark_loop or self.dspark_prefill
        return None if side is None else side.contexts


def _started(new: Any) -> StartedRequest:
    """A request of vLLM's scheduler output, as plain data."""
    tokens = np.asarray(new.prompt_token_ids or (), dtype=np.int32)
    extra = new.sampling_params.extra_args if new.sampling_params is not None else None
    return StartedRequest(new.req_id, min(new.num_computed_tokens, len(tokens)), tokens, extra or {})
