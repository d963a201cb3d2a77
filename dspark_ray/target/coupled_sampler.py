"""Coupled verification: the output is a function of target and seed alone (dspark-spec.md section 3).

Every verified position becomes one row of a larger batch, and vLLM's own sampler, the one that plain decoding
uses, draws every row's token: penalties, bans, biases, grammar, top-k, top-p and logprobs therefore mean the
same at each slot as without speculation. A draft is accepted iff it equals the draw at its position; the first
draw that differs is emitted in its stead. Seeded requests draw row after row from their own generator, which is
then set back to just after the last emitted token, so the next step starts where plain decoding would.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from dspark_ray.target.slot_processors import over_slots


class GeneratorTape(dict[int, torch.Generator]):
    """Logits row -> generator, noting each generator's state just before its row is drawn.

    vLLM's samplers walk over ``items()`` and draw one row's noise for each entry; rows of one request come in
    order and share its generator.
    """

    def __init__(self, rows: dict[int, torch.Generator]):
        super().__init__(rows)
        self.states: dict[int, torch.Tensor] = {}

    def items(self) -> Iterator[tuple[int, torch.Generator]]:  # type: ignore[override]
        """Entries in row order, each noted when it is handed out."""
        for row, generator in super().items():
            self.states[row] = generator.get_state()
            yield row, generator

    def rewind(self, row: int) -> None:
        """Set the generator of `row` back to before that row was drawn."""
        if row in self.states:  # greedy batches draw nothing
            self[row].set_state(self.states[row])


class CoupledRejectionSampler(RejectionSampler):
    """vLLM's rejection sampler with its accept and resample step replaced by the target's own draws."""

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,  # noqa: ARG002 - argmax drafts have none; the interface is vLLM's
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Draw every slot, keep each request's draws up to and including the first that is not its draft.

        Args:
            metadata: of this step; request i has num_draft_tokens[i] drafts and one row more.
            draft_probs: unused.
            logits: [rows, V], rows of a request consecutive, the bonus row last; may be changed in place.
            sampling_metadata: one entry a request.

        Returns:
            Token ids [B, max_spec_len + 1] int32, PLACEHOLDER_TOKEN_ID behind the emitted ones, and logprobs
            (if asked for) in the same order, flattened.
        """
        counts = [drafted + 1 for drafted in metadata.num_draft_tokens]
        per_request = torch.tensor(counts, device=logits.device)
        starts = per_request.cumsum(0) - per_request
        tape = _tape(sampling_metadata.generators, counts)
        output = self.sampler(logits=logits, sampling_metadata=slot_metadata(sampling_metadata, counts, tape))

        width = metadata.max_spec_len + 1
        slots = torch.arange(width, device=logits.device)
        rows = (starts[:, None] + slots).clamp_(max=logits.shape[0] - 1)  # [B, width]
        drawn = output.sampled_token_ids.view(-1)[rows]  # [B, width]
        emitted = accepted_lengths(drawn, metadata, per_request) + 1  # [B]
        token_ids = torch.where(slots < emitted[:, None], drawn, PLACEHOLDER_TOKEN_ID)
        if tape:
            _give_back(tape, sampling_metadata.generators, counts, emitted.tolist())
        logprobs = output.logprobs_tensors
        if logprobs is not None:
            flat = rows.flatten()
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[flat], logprobs.logprobs[flat], logprobs.selected_token_ranks[flat]
            )
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=logprobs)


def accepted_lengths(drawn: torch.Tensor, metadata: SpecDecodeMetadata, counts: torch.Tensor) -> torch.Tensor:
    """How many leading drafts equal the target's draws.

    Args:
        drawn: [B, max_spec_len + 1], the target's draw at each slot.
        metadata: holds the drafts, flattened over requests.
        counts: [B], slots of each request.

    Returns:
        A [B] int64, 0..drafts of the request.
    """
    real = torch.arange(metadata.max_spec_len, device=drawn.device) < (counts - 1)[:, None]
    drafts = torch.full(real.shape, PLACEHOLDER_TOKEN_ID, dtype=drawn.dtype, device=drawn.device)
    drafts[real] = metadata.draft_token_ids.to(drawn.dtype)
    return ((drawn[:, :-1] == drafts) & real).cumprod(dim=1).sum(dim=1)


def slot_metadata(
    metadata: SamplingMetadata, counts: list[int], generators: dict[int, torch.Generator]
) -> SamplingMetadata:
    """Sampling metadata of a batch with one row a slot, from that with one row a request.

    Args:
        metadata: per request.
        counts: slots of each request; slot j of a request has seen its first j drafts.
        generators: row -> generator.
    """
    owner = [request for request, count in enumerate(counts) for _ in range(count)]
    index = torch.tensor(owner, device=metadata.frequency_penalties.device)

    def each(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[index]

    def rows_of(by_request: dict[int, Any]) -> dict[int, Any]:
        return {row: by_request[request] for row, request in enumerate(owner) if request in by_request}

    return replace(
        metadata,
        temperature=each(metadata.temperature),
        top_p=each(metadata.top_p),
        top_k=each(metadata.top_k),
        generators=generators,
        prompt_token_ids=each(metadata.prompt_token_ids),
        frequency_penalties=each(metadata.frequency_penalties),
        presence_penalties=each(metadata.presence_penalties),
        repetition_penalties=each(metadata.repetition_penalties),
        output_token_ids=_outputs_before_each_slot(metadata, counts),
        spec_token_ids=None,
        allowed_token_ids_mask=each(metadata.allowed_token_ids_mask),
        bad_words_token_ids=rows_of(metadata.bad_words_token_ids),
        logprob_token_ids=rows_of(metadata.logprob_token_ids) if metadata.logprob_token_ids else None,
        logitsprocs=over_slots(metadata.logitsprocs, counts),
        thinking_budget_state_holder=None,  # start-up refuses thinking budgets with a drafter
    )


def _outputs_before_each_slot(metadata: SamplingMetadata, counts: list[int]) -> list[list[int]]:
    """Output tokens that penalties and bad words see at each slot: committed ones, then earlier drafts."""
    if not metadata.output_token_ids:
        return []
    drafts = (metadata.spec_token_ids or [])[: len(counts)]  # vLLM's list is as long as its largest batch
    return [
        [*committed, *drafted[:slot]]
        for committed, drafted, count in zip(metadata.output_token_ids, drafts, counts, strict=True)
        for slot in range(count)
    ]


def _tape(generators: dict[int, torch.Generator], counts: list[int]) -> GeneratorTape:
    rows, first = {}, 0
    for request, count in enumerate(counts):
        if request in generators:
            rows.update(dict.fromkeys(range(first, first + count), generators[request]))
        first += count
    return GeneratorTape(rows)


def _give_back(
    tape: GeneratorTape, generators: dict[int, torch.Generator], counts: list[int], emitted: list[int]
) -> None:
    """Rewind every seeded request to just after its last emitted token."""
    first = 0
    for request, (count, kept) in enumerate(zip(counts, emitted, strict=True)):
        if request in generators and kept < count:
            tape.rewind(first + kept)
        first += count
