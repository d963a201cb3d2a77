"""Step profile, verify lengths, options and start-up checks."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from dspark_ray.config import ModelConfig, SchedulingConfig
from dspark_ray.decoding.calibration import Calibration, CalibrationTable
from dspark_ray.errors import CheckpointError, ConfigError
from dspark_ray.protocol import StepCost, TargetControl
from dspark_ray.target.assemble import plan
from dspark_ray.target.deadline import LEAST_S, MOST_S, Deadline
from dspark_ray.target.options import TargetOptions, engine_arguments, options_of, target_options
from dspark_ray.target.step_profile import StepProfile, measure_steps, profile_sizes
from dspark_ray.target.verify import DraftedRow, VerifyPlanner


def planner(mode: str, profile: StepProfile | None = None, **config) -> VerifyPlanner:
    scheduling = SchedulingConfig(mode=mode, **({"full_round_share": 0.0} | config))
    return VerifyPlanner(
        scheduling, tau=0.3, profile=profile or StepProfile([1, 8, 64], [1.0, 1.1, 4.0]), exactness="coupled",
        block_size=5, calibration=None, rng=random.Random(0),
    )  # fmt: skip


LOGIT = {0.9: 2.1972245773, 0.8: 1.3862943611, 0.5: 0.0}
ROW = DraftedRow([LOGIT[0.9], LOGIT[0.8], LOGIT[0.5], LOGIT[0.5], LOGIT[0.5]], 0.0, 9)  # .9 .72 .36 .18 .09


def test_modes_switch_at_run_time():
    plan_ = planner("fixed_len", fixed_tau=0.5)
    assert plan_.lengths([ROW], 0)[0] == [5]
    plan_.control(TargetControl(mode="tau"))
    assert plan_.lengths([ROW], 0)[0] == [3]
    plan_.control(TargetControl(tau=0.75))
    assert plan_.lengths([ROW], 0)[0] == [1]
    plan_.control(TargetControl(mode="fixed_tau"))
    assert plan_.lengths([ROW], 0)[0] == [2]
    plan_.control(TargetControl(fixed_tau=0.1))
    assert plan_.lengths([ROW], 0)[0] == [4]
    plan_.control(TargetControl(mode="fixed_len", fixed_len=4, max_verify_len=2))
    assert plan_.lengths([ROW], 0)[0] == [2]
    assert plan_.draft_len(9) == 2


def test_a_new_mode_judges_by_its_own_rounds():
    """Whole blocks that did not pay under fixed_len are no reason to skip drafting under throughput."""
    plan_ = planner("fixed_len", StepProfile([1, 8, 64], [1.0, 8.0, 64.0]))
    for _ in range(100):
        plan_.observe_round(5, 0)
    plan_.control(TargetControl(mode="throughput"))
    assert plan_.worth_drafting(4, 0)
    for _ in range(16):
        plan_.observe_round(5, 0)
    assert not plan_.worth_drafting(4, 0)
    plan_.control(TargetControl(mode="throughput", tau=0.4))  # said again, it changes nothing
    assert not plan_.worth_drafting(4, 0)


def test_pooled_step_costs_and_a_shared_calibration_are_used_from_then_on():
    profile = StepProfile([1, 2, 64], [1.0, 1.1, 3.0])
    plan_ = planner("throughput", profile)
    assert plan_.lengths([ROW], 0)[0] == [5]
    plan_.control(TargetControl(step_cost=StepCost((1, 64), (0.001, 0.064))))
    assert plan_.lengths([ROW], 0)[0] == [0], "every further token costs a whole step"
    assert profile.step_ms == pytest.approx([1.0, 2.0, 64.0])
    profile.observe_step(1, 2.0, plain=False)
    assert profile.step_ms[0] > 1.0, "refined from there"
    profile.adopt([1, 2], [5.0, 6.0])
    assert profile.step_ms[2] > 60.0, "beyond its end the engine's own"
    plan_ = planner("tau")
    assert plan_.lengths([ROW], 0)[0] == [3]
    fitted = Calibration(
        exactness="coupled", temperature_bucket="greedy", block_size=5, temperatures=[10.0] * 5, dataset="d",
        sample_count=1, ece_before=[0.0] * 5, ece_after=[0.0] * 5, auc=[0.5] * 5, wrong_side_share=[0.0] * 5,
    )  # fmt: skip
    table = CalibrationTable(entries=[fitted]).model_dump_json().encode()
    plan_.control(TargetControl(calibration=table))
    assert plan_.lengths([ROW], 0)[0] == [1], ".55, .3"


def test_room_and_full_rounds():
    short = DraftedRow(ROW.confidence_logits, 0.0, 1)
    assert planner("fixed_len").lengths([ROW, short], 0)[0] == [5, 1]
    lengths, full = planner("tau", full_round_share=1.0).lengths([ROW, short], 0)
    assert (lengths, full) == ([5, 1], [True, True])


def test_a_steep_curve_verifies_less_and_a_free_one_more():
    steep = planner("throughput", StepProfile([1, 2, 64], [1.0, 2.0, 64.0]))
    free = planner("throughput", StepProfile([1, 32, 64], [1.0, 1.1, 2.0]))
    assert steep.lengths([ROW], 0)[0] == [0]
    assert free.lengths([ROW], 0)[0] == [5]
    both = planner("tau+throughput", StepProfile([1, 32, 64], [1.0, 1.1, 2.0]))
    assert both.lengths([ROW], 0)[0] == [3]  # tau is the floor on survival


def test_a_plateau_behind_a_rise_is_not_stopped_at():
    """The asynchronous form: Algorithm 1 stops at the rise, the global optimum lies on the plateau."""
    jagged = StepProfile([1, 2, 3, 8, 64], [1.0, 1.0, 1.9, 1.95, 12.0])
    assert jagged.is_jagged
    assert not StepProfile([1, 2, 4, 8], [1.0, 1.1, 1.3, 1.7]).is_jagged
    sure = DraftedRow([6.0] * 5, 0.0, 9)
    assert planner("throughput", jagged).lengths([sure], 0)[0] == [5]


def test_online_steps_move_the_curve_towards_what_is_measured():
    """Breaks when only the exact size is updated, or a burst of one size bends the others out of shape."""
    profile = StepProfile(profile_sizes(64), [1.0 + 0.05 * n for n in profile_sizes(64)])
    for _ in range(200):
        for tokens in (1, 6, 13, 40):
            profile.observe_step(tokens, 3 * (1.0 + 0.05 * tokens), plain=False)
    for tokens in (1, 6, 13, 20, 40, 60):
        assert profile.milliseconds(tokens, plain=False) == pytest.approx(3 * (1.0 + 0.05 * tokens), rel=0.1)
    profile.observe_step(1000, 50.0, plain=False)  # a long prefill is no verify pass
    assert profile.milliseconds(40, plain=False) == pytest.approx(9.0, rel=0.1)


@pytest.mark.parametrize(("overhead_ms", "pays"), [(1.0, True), (9.0, False)])
def test_whether_drafting_pays_is_judged_by_what_both_kinds_of_step_take(overhead_ms, pays):
    """Breaks when steps with drafts say what plain ones cost: then what is done most always looks right."""
    profile = StepProfile([1, 8, 64], [10.0, 11.0, 30.0])  # knows nothing of the overhead
    plan_ = planner("throughput", profile)
    choices = []
    for _ in range(600):
        drafts = plan_.worth_drafting(1, 0)
        choices.append(drafts)
        if drafts:
            profile.observe_step(3, 10.3 + overhead_ms, plain=False)
            profile.observe_draft(1, 2.0)
            plan_.observe_round(2, 1 if len(choices) % 2 else 0)  # half a token more
        else:
            profile.observe_step(1, 10.0, plain=True)
    assert (sum(choices[-300:]) > 250) == pays
    assert 0 < sum(choices[-300:]) < 300, "both ways are tried from time to time"


def test_a_pooled_curve_keeps_what_is_known_of_plain_steps():
    """What replicas pool are steps that verify drafts; adopting them must not make plain ones as dear."""
    profile = StepProfile([1, 8], [10.0, 11.0])
    for _ in range(100):
        profile.observe_step(1, 10.0, plain=True)
        profile.observe_step(8, 22.0, plain=False)
    before = profile.milliseconds(1, plain=True) / profile.milliseconds(1, plain=False)
    profile.adopt([1, 8], [20.0, 22.0])
    assert before < 0.7
    assert profile.milliseconds(1, plain=True) == pytest.approx(before * 20.0)


def test_drafting_comes_back_soon_after_a_hard_passage():
    """Breaks when one round in a few dozen steps is all that is learnt while drafts are skipped."""
    profile = StepProfile([1, 8, 64], [10.0, 11.0, 30.0])
    plan_ = planner("throughput", profile)

    def decode(steps: int, accepted: int) -> int:
        drafted = 0
        for _ in range(steps):
            if plan_.worth_drafting(1, 0):
                drafted += 1
                profile.observe_step(4, 10.4, plain=False)
                profile.observe_draft(1, 3.0)
                plan_.observe_round(3, accepted)
            else:
                profile.observe_step(1, 10.0, plain=True)
        return drafted

    decode(100, accepted=1)
    assert decode(200, accepted=0) < 80, "drafts that are never accepted do not pay"
    decode(100, accepted=1)
    assert decode(100, accepted=1) > 90


def test_draft_time_is_part_of_the_step():
    profile = StepProfile([1, 64], [10.0, 20.0])
    assert profile.curve(3).milliseconds(1) == 10.0
    fresh = StepProfile([1, 64], [10.0, 20.0])
    fresh.observe_draft(4, 5.0)
    assert fresh.curve(3).milliseconds(1) == 15.0


def test_measuring_takes_the_median_and_drops_the_first_round():
    durations = iter([9.0, 9.0, 0.001, 0.002, 0.003, 0.002, 0.001, 0.050])
    now = [0.0]

    def run(size: int) -> None:
        now[0] += next(durations)

    assert measure_steps(run, [1, 2], lambda: now[0]) == pytest.approx([1.0, 2.0])
    assert profile_sizes(96)[:8] == list(range(1, 9))
    assert profile_sizes(3) == [1, 2, 3]


def test_the_deadline_follows_the_drafter_up_and_down():
    deadline = Deadline(None)
    for _ in range(50):
        deadline.observe(0.002)
    assert deadline.seconds < 3 * LEAST_S
    for _ in range(50):
        deadline.observe(0.1)
    assert 0.1 < deadline.seconds < 0.25
    for _ in range(50):
        deadline.observe(9.0)
    assert deadline.seconds == MOST_S
    assert Deadline(7.0).seconds == 0.007


def config_of(target: Path, options: dict, **changes) -> SimpleNamespace:
    fields = {
        "additional_config": {"dspark": options},
        "model_config": SimpleNamespace(model=str(target)),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=1),
        "speculative_config": SimpleNamespace(num_speculative_tokens=3),
        "reasoning_config": None,
    } | changes
    return SimpleNamespace(**fields)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A target's and a drafter's configuration that fit each other."""
    from tiny_drafter import tiny_model

    from dspark_ray.drafter.checkpoint import save_drafter

    model = tiny_model()
    save_drafter(model, tmp_path / "draft")
    target = tmp_path / "target"
    target.mkdir()
    config = model.config
    raw = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "num_hidden_layers": 6}
    (target / "config.json").write_text(json.dumps(raw))
    return target, tmp_path / "draft"


def planned(pair, changes: dict | None = None, **config):
    target, draft = pair
    options = {"placement": "remote", "checkpoint": str(draft)} | (changes or {})
    vllm_config = config_of(target, options, **config)
    return plan(options_of(vllm_config), vllm_config)


def test_a_pair_that_fits_is_accepted(pair):
    blueprint = planned(pair, {"window_tokens": 32})
    assert blueprint.aux_layers == (2, 4)
    assert (blueprint.window, blueprint.block_size) == (32, 3)
    assert plan(TargetOptions(), config_of(pair[0], {})) is None


@pytest.mark.parametrize(
    ("options", "config", "error", "names"),
    [
        (
            {},
            {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
            ConfigError,
            "pipeline_parallel_size",
        ),
        ({}, {"speculative_config": None}, ConfigError, "speculative_config"),
        ({"placement": "prefill"}, {}, ConfigError, "speculative_config"),
        (
            {},
            {"speculative_config": SimpleNamespace(num_speculative_tokens=9)},
            CheckpointError,
            "block_size",
        ),
        ({}, {"reasoning_config": object()}, ConfigError, "reasoning_config"),
        ({"checkpoint": "/nowhere"}, {}, ConfigError, "checkpoint"),
        ({}, {"model_config": SimpleNamespace(model="org/name")}, ConfigError, "local folder"),
        ({"windw_tokens": 3}, {}, ConfigError, "windw_tokens"),
        ({"checkpoint": None}, {}, ConfigError, "checkpoint is needed"),
    ],
)
def test_start_up_refuses_by_name_what_cannot_work(pair, options, config, error, names):
    with pytest.raises(error, match=names):
        planned(pair, options, **config)


def test_a_drafter_of_another_target_is_refused(pair):
    raw = {"hidden_size": 16, "vocab_size": 65, "num_hidden_layers": 6}
    (pair[0] / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="vocab_size"):
        planned(pair)


def test_engine_arguments_round_trip(pair):
    options = TargetOptions(placement="remote", checkpoint=pair[1], tau=0.4)
    arguments = engine_arguments(options, 3)
    assert options_of(SimpleNamespace(additional_config=arguments["additional_config"])) == options
    assert arguments["speculative_config"]["num_speculative_tokens"] == 3
    prefill = engine_arguments(options.model_copy(update={"placement": "prefill"}), 3, gpu=True)
    assert "speculative_config" not in prefill
    assert prefill["worker_cls"].endswith("DSparkGPUWorker")


def test_a_models_configuration_reaches_its_engines(pair):
    drafter = {"placement": "remote", "source": str(pair[1]), "window_tokens": 99, "deadline_ms": 40.0}
    raw = {"id": "m", "target": {"source": str(pair[0])}, "drafter": drafter, "exactness": "ratio"}
    model = ModelConfig.model_validate(raw | {"scheduling": {"mode": "tau"}})
    verifier = target_options(model, prefills=False, secret_env="S", host="10.0.0.3")
    assert (verifier.placement, verifier.exactness, verifier.scheduling.mode) == ("remote", "ratio", "tau")
    assert (verifier.window_tokens, verifier.deadline_ms, verifier.secret_env) == (99, 40.0, "S")
    prefill = target_options(model, prefills=True, secret_env="S", host="10.0.0.3")
    assert (prefill.placement, prefill.handoff_bind) == ("prefill", "tcp://10.0.0.3:*")
    plain = ModelConfig.model_validate({"id": "m", "target": {"source": str(pair[0])}})
    assert target_options(plain, prefills=False, secret_env="S") == TargetOptions()
