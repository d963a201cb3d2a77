"""The shim in a real engine: what it says is what plain vLLM says, whatever happens around it.

Every scenario runs in a process of its own (see target_engine.py). ``python tests/e2e/test_target_engine.py``
runs the full sizes: 100 prompts of 64 tokens in every mode, with the drafter named in its first argument.
"""

import sys
from pathlib import Path

import pytest
from target_engine import DEMO_MODEL, in_engine_process

pytestmark = pytest.mark.skipif(not DEMO_MODEL.exists(), reason="run `dspark-ray fetch-demo` first")
TRAINED = Path(__file__).parents[2] / "deployments" / "drafters" / "smollm2-135m"


@pytest.fixture(scope="session")
def random_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafter") / "random"
    in_engine_process("target_drafting:make_random_drafter", folder=str(folder))
    return folder


@pytest.fixture(scope="session")
def drafter(random_drafter: Path) -> Path:
    """The trained drafter of the demo model, or one that has learnt nothing."""
    return TRAINED if (TRAINED / "model.safetensors").exists() else random_drafter


def test_lying_drafts_change_nothing_in_any_kind_of_request():
    """Faults 12-21: 35 kinds of request, among them penalties, biases, bans, stops, logprobs, JSON, n and lengths."""
    result = in_engine_process("target_coupled:compare", rounds=1, prompts=2, timeout_s=500)
    assert result["differing"] == []
    assert result["accepted"] > 0.2 * result["drafted"] > 0


def test_seeded_requests_survive_chunked_prefill_and_vllm_alone_does_not():
    """The fault that the worker mends, with and without speculation."""
    ours = in_engine_process("target_coupled:seeded_chunks", worker="ours")
    assert ours["chunked"] == ours["whole"]
    speculative = in_engine_process("target_coupled:seeded_chunks", worker="adversary")
    assert speculative["chunked"] == ours["whole"]
    with pytest.raises(RuntimeError, match="does not use offset"):
        in_engine_process("target_coupled:seeded_chunks", worker="plain")


def test_every_mode_says_what_plain_decoding_says(drafter: Path):
    """Greedy and seeded, alone and in a batch, chunked prefill, prefix hits; a remote drafter."""
    result = in_engine_process(
        "target_drafting:exactness", checkpoint=str(drafter), prompts=6, max_tokens=20, timeout_s=500
    )
    assert result["differing"] == []
    assert result["prefix_restored"] > 0


def test_preempted_requests_say_the_same(random_drafter: Path):
    result = in_engine_process(
        "target_drafting:exactness", checkpoint=str(random_drafter), prompts=5, max_tokens=100,
        modes=["fixed_len"], placement="colocated", timeout_s=500,
    )  # fmt: skip
    assert result["differing"] == []
    assert result["preempted"] > 0


def test_a_lost_drafter_costs_steps_and_no_text(drafter: Path):
    result = in_engine_process("target_drafting:drafter_lost", checkpoint=str(drafter), timeout_s=500)
    assert all(result["same"])
    assert result["misses"] > 0
    assert result["rounds_after"] > 0
    assert result["accept_len"]["after"] == pytest.approx(result["accept_len"]["before"], rel=0.02)


@pytest.mark.slow
def test_another_drafter_takes_over_in_mid_answer(drafter: Path, random_drafter: Path):
    """Until worker and pool have the same one, answers decode plainly; a misfit is refused and changes nothing."""
    result = in_engine_process(
        "target_drafting:drafter_swapped", old=str(random_drafter), new=str(drafter), timeout_s=500
    )
    assert all(result["same"])
    assert "no folder" in result["refused"]
    assert result["accepted"] is None
    phases = result["phases"]
    assert all(phases[name]["rounds"] > 0 for name in ("old", "refused", "new"))
    assert [phases[name]["mismatched"] for name in ("old", "refused", "new")] == [0, 0, 0]
    assert phases["skewed"]["rounds"] == 0 or phases["skewed"]["mismatched"] > 0
    assert phases["skewed"]["rounds"] < phases["new"]["rounds"]


def test_aborted_requests_leave_nothing_behind(drafter: Path):
    """Fault 19."""
    result = in_engine_process("target_drafting:storm_of_aborts", checkpoint=str(drafter), timeout_s=500)
    assert {name: result[name] for name in ("contexts", "kv_usage", "running", "drafter_slots")} == {
        "contexts": 0, "kv_usage": 0.0, "running": 0.0, "drafter_slots": 0,
    }  # fmt: skip


def test_acceptance_is_that_of_evaluate(drafter: Path):
    """Faults 1, 7-10: in the engine, chunked and after prefix hits, a round gives as many tokens as in one process."""
    result = in_engine_process("target_drafting:acceptance", checkpoint=str(drafter), timeout_s=500)
    assert result["same"] == [12, 12]
    assert result["restored"] == [0, 12]
    assert result["chunked"] == pytest.approx(result["evaluate"], rel=0.02)
    assert result["prefix_hits"] == pytest.approx(result["chunked"], rel=0.005)


def test_a_prefill_engine_offers_the_projected_hidden_states(random_drafter: Path):
    """Faults 6-9: layers, positions, all chunks, prefix hits; fetched over the socket, against transformers."""
    result = in_engine_process("target_drafting:prefill_offers", checkpoint=str(random_drafter))
    assert [error["rows"] for error in result["errors"]] == [
        min(80, length) for length in result["lengths"]
    ] * 2
    assert all(error["end"] == 0 and error["error"] < 0.01 for error in result["errors"])
    assert result["handoffs"] == {"waiting": 0, "offered": 6, "fetched": 6, "expired": 0}


def test_the_ratio_rule_leaves_greedy_neighbours_alone(random_drafter: Path):
    """vLLM's CPU kernel gives draft rows uninitialised parameters; the mended function does not."""
    assert all(in_engine_process("target_drafting:ratio", checkpoint=str(random_drafter))["same_greedy"])


@pytest.mark.slow
def test_tensor_parallel_ranks_agree(drafter: Path):
    """Three ranks (the model has three key/value heads); only the first one drafts."""
    result = in_engine_process("target_drafting:tensor_parallel", checkpoint=str(drafter))
    assert all(result["same"])
    assert result["mean_logprob"] > -2.5
    assert result["talking"] == [True, False, False]


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_unseeded_answers_are_distributed_as_without_speculation():
    """Two-sample chi-square of tokens 2 to 4, 4,000 answers each, bins of at least 40, alpha 0.001."""
    result = in_engine_process("target_coupled:unseeded", timeout_s=1200)
    assert result["accepted"] > 400
    for plain, speculative in zip(result["counts"]["plain"], result["counts"]["speculative"], strict=True):
        statistic, freedom = _two_sample_chi_square(plain, speculative)
        # Wilson-Hilferty: the cube root of chi-square over its freedom is nearly normal
        z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
        assert z < 3.09


def _two_sample_chi_square(a: dict[str, int], b: dict[str, int]) -> tuple[float, int]:
    """Statistic and degrees of freedom of two samples of equal size; rare tokens share one bin."""
    both = {token: a.get(token, 0) + b.get(token, 0) for token in a.keys() | b.keys()}
    bins = [(a.get(token, 0), b.get(token, 0)) for token, count in both.items() if count >= 80]
    bins.append((sum(a.values()) - sum(x for x, _ in bins), sum(b.values()) - sum(y for _, y in bins)))
    return sum((x - y) ** 2 / (x + y) for x, y in bins if x + y), len(bins) - 1


if __name__ == "__main__":
    found = in_engine_process(
        "target_drafting:exactness", checkpoint=sys.argv[1], prompts=60, max_tokens=64, timeout_s=7200
    )
    print(found)
    sys.exit(bool(found["differing"]))
