"""All of `served_path.py`, at full size. An hour or two on two cores, so run it by itself:

python -m pytest tests/serve/test_served_path.py --run-slow
"""

import pytest
from served_path import MODES, WITHIN, compare_acceptance, compare_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]
ALL = {"modes": list(MODES), "streams": [1, 16], "prompts": 100, "tokens": 64}


@pytest.mark.parametrize("drafter", ["trained", "random"])
def test_text_is_that_of_vllm_alone(drafter: str) -> None:
    runs = compare_texts(drafters=[drafter], dtype="float32", **ALL)["runs"]
    assert len(runs) == 12
    assert [run["differing"] for run in runs] == [[]] * 12
    speculating = [run for run in runs if run["mode"] in ("fixed_len", "fixed_tau", "tau")]
    assert all(run["verified"] > 0 for run in speculating)


def test_text_in_bf16_parts_from_vllm_alone_at_near_ties_only() -> None:
    runs = compare_texts(drafters=["trained"], dtype="bfloat16", **ALL)["runs"]
    assert [run["not_near_ties"] for run in runs] == [0] * 12


def test_accept_length_is_that_of_one_process() -> None:
    result = compare_acceptance(drafter="trained", prompts=100, tokens=64, streams=16)
    lengths = result["accept_len"]
    assert lengths == pytest.approx(dict.fromkeys(lengths, lengths["evaluate"]), rel=WITHIN)
    assert result["preemptions"] > 0
    assert result["prefix_restored"] > 0
