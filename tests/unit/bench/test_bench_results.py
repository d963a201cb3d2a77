"""Figures and reports of `dspark-ray bench`, on turns whose figures are known by hand."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dspark_ray.bench.arms import Arm, Offer, parse_arm, turns
from dspark_ray.bench.load import Answer, Turn
from dspark_ray.bench.prompts import MIXED, SETS, load_prompts
from dspark_ray.bench.results import Results, load, percentiles, save, summary, turn_record
from dspark_ray.bench.speculation import DraftCounts, counts_between
from dspark_ray.cli import main
from dspark_ray.errors import ConfigError

URL = "http://127.0.0.1:1/v1"
TEN_MS = Answer(0.1, (0.01,) * 10, 11, 7, text="a")  # 10 ms a token
FORTY_MS = Answer(0.3, (0.04,) * 10, 11, 7, text="b")
TWO_A_GAP = Answer(0.2, (0.04,) * 5, 11, 7, text="a")  # 20 ms a token, 40 ms an event
FAILED = Answer(0.0, (), 0, 0, error="Traceback:\nServiceUnavailable")


def results(*records, baselines=("plain",), sla_ms=30.0) -> Results:
    arms = [{"name": name, "url": URL} for name in dict.fromkeys(r.arm for r in records)]
    about = {
        "machine": "m", "load_average_before": 1.0, "load_average_after": 2.0, "finished": "then", "commit": "c",
        "dataset": "gsm8k", "max_tokens": 11, "temperature": 0.0, "rounds": 2,
    }  # fmt: skip
    offers = [{"streams": 2, "requests": 2}]
    return Results(about, arms, offers, list(baselines), sla_ms, 0.36, list(records))


def record(arm: str, number: int, seconds: float, *answers: Answer, counts: DraftCounts | None = None):
    return turn_record(arm, "2 streams", number, Turn(seconds, answers), closed_loop=False, counts=counts)


def test_a_turns_speed_latency_goodput_and_cost():
    row = summary(results(record("plain", 0, 2.0, TEN_MS, FORTY_MS)))[0]
    assert row.tokens_per_s == 11.0  # 22 tokens in 2 s
    assert row.user_tokens_per_s == pytest.approx(1000 / 25)  # median of 10 and 40 ms
    assert row.ttft_ms == {"p50": 200.0, "p95": 290.0, "p99": 298.0}
    assert row.goodput_tokens_per_s == 5.5  # only the fast request is within 30 ms
    assert row.within_sla == 0.5
    assert row.dollars_per_million_tokens == pytest.approx(0.36 / 3600 / 11 * 1e6)
    assert row.ratios == {}


def test_a_closed_loop_is_measured_until_a_stream_finds_no_more_requests():
    """A straggler at the end says how uneven the answers are; it must not make an arm look slow."""
    tenth = (0.1,) * 9  # ten tokens, a second with the wait for the first
    turn = Turn(
        5.1,
        (
            Answer(0.1, tenth, 10, 7, started_s=100.0),
            Answer(0.1, (0.2,) * 9, 10, 7, started_s=100.0),
            # in the first's stream; the second's is free at 101.9
            Answer(0.1, (0.1,) * 39, 40, 7, started_s=101.05),
            FAILED,
        ),
    )
    tokens, seconds = turn.busy_part()
    assert seconds == pytest.approx(1.9)
    assert tokens == pytest.approx(10 + 10 + 8)
    measured = turn_record("plain", "2 streams", 0, turn, closed_loop=True, counts=None)
    assert measured.tokens_per_s == pytest.approx(28 / 1.9, rel=1e-3)
    assert turn_record("plain", "1 requests/s", 0, turn, closed_loop=False, counts=None).busy_s == 0
    assert Turn(1.0, (FAILED,)).busy_part() == (0.0, 0.0)


def test_time_per_token_is_not_time_per_event():
    row = summary(results(record("plain", 0, 1.0, TWO_A_GAP)))[0]
    assert row.token_ms["p50"] == 20.0
    assert row.gap_ms["p50"] == 40.0


def test_ratios_are_taken_round_by_round():
    """A machine that is twice as slow in one round is so for both arms of that round."""
    rows = summary(
        results(
            record("plain", 0, 1.0, TEN_MS), record("plain", 1, 2.0, TEN_MS), record("plain", 2, 8.0, TEN_MS),
            record("fast", 2, 4.0, TEN_MS), record("fast", 0, 0.5, TEN_MS), record("fast", 1, 2.0, TEN_MS),
        )
    )  # fmt: skip
    ratio = rows[1].ratios["plain"]
    assert (ratio.lowest, ratio.median, ratio.highest) == (1.0, 2.0, 2.0)


def test_failures_are_counted_and_shown_and_cost_nobody_elses_figures():
    row = summary(results(record("plain", 0, 1.0, TEN_MS, FAILED)))[0]
    assert (row.requests, row.failed, row.error) == (1, 1, "ServiceUnavailable")
    assert row.tokens_per_s == 11.0


def test_texts_of_an_arm_are_compared_with_the_baselines():
    rows = summary(
        results(record("plain", 0, 1.0, TEN_MS, FORTY_MS), record("other", 0, 1.0, TWO_A_GAP, TEN_MS))
    )
    assert rows[1].same_text == 0.5


def test_percentiles_of_few_values():
    assert percentiles([]) == {}
    assert percentiles([5.0]) == {"p50": 5.0, "p95": 5.0, "p99": 5.0}


def stats(**shim) -> dict:
    """A verifier's `stats()`, as recorded from one."""
    base = {
        "steps": 10, "rounds": 0, "tokens_verified": 0, "tokens_accepted": 0, "tokens_committed": 10,
        "accepted_at": [], "verified_at": [], "reached_at": [], "verify_ms": 100.0, "between_ms": 0.0,
    }  # fmt: skip
    return {"pid": 1, "requests_running": 1, "workers": {"shim": base | shim, "client": {"calls": 1}}}


def test_counts_of_a_turn_are_what_has_changed():
    before = [stats()]
    after = [
        stats(steps=14, rounds=3, tokens_verified=9, tokens_accepted=4, tokens_committed=18, verify_ms=180.0,
              accepted_at=[2, 1, 1], reached_at=[3, 2, 1])
    ]  # fmt: skip
    counts = counts_between(before, after, tau=0.3)
    assert counts.accept_len == pytest.approx(1 + 4 / 3)
    assert counts.verify_len == 9 / 4  # one of the four steps verified nothing
    assert (
        DraftCounts(rounds=4, verified=20, accepted=5).verify_len == 5
    )  # a server that does not say what it committed
    assert counts.waste == pytest.approx(5 / 9)
    assert counts.tokens_per_step == (4 + 9) / 4
    assert counts.step_ms == 20.0
    assert counts.acceptance_at == pytest.approx((2 / 3, 1 / 2, 1.0))
    assert counts.tau == 0.3


def test_counts_add_up_over_rounds_and_tau_by_steps():
    total = DraftCounts(rounds=1, steps=3, tau=0.2, accepted_at=(1,)) + DraftCounts(
        rounds=2, steps=1, tau=0.6, accepted_at=(1, 1)
    )
    assert (total.rounds, total.accepted_at) == (3, (2, 1))
    assert total.tau == pytest.approx(0.3)


def test_without_drafts_nothing_is_claimed():
    counts = counts_between([stats()], [stats()], tau=None)
    assert (counts.accept_len, counts.waste, counts.step_ms, counts.tau) == (None, None, None, None)


def test_each_round_begins_with_another_arm():
    arms = [Arm(name=name, url=URL) for name in "abc"]
    order = [(number, arm.name) for number, arm in turns(arms, 2)]
    assert order == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a")]


def test_arms_of_the_command_line():
    arm = parse_arm("fixed:mode=fixed_len,verify_len=3,url=https://host:8/v1,model=a/b", URL)
    assert arm == Arm(name="fixed", url="https://host:8/v1", model="a/b", mode="fixed_len", verify_len=3)
    assert parse_arm("plain", URL) == Arm(name="plain", url=URL)


@pytest.mark.parametrize(
    "text", ["x:speed=1", "x:mode=quick", "x:tau=0.5", "x:mode", "x:mode=tau,tau=2", "x:url=ftp://h", "x y"]
)
def test_wrong_arms_are_refused_by_name(text: str):
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_arm(text, URL)


def test_a_load_is_of_one_kind():
    assert Offer(streams=1, requests=2).label == "1 stream"
    assert Offer(rate_per_s=0.5, requests=2).label == "0.5 requests/s"
    with pytest.raises(ValueError, match="either"):
        Offer(requests=2)


def test_the_sets_are_there_and_mixed_evenly():
    assert {len(load_prompts(name)) for name in SETS} == {64}
    assert load_prompts(MIXED)[:3] == [load_prompts(name)[0] for name in SETS]


def test_a_file_of_prompts_in_any_of_the_usual_shapes(tmp_path: Path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a"}\n\n{"turns": ["b", "c"]}\n{"messages": [{"role": "user", "content": "d"}]}\n'
    )
    assert load_prompts(str(file)) == ["a", "b", "d"]
    file.write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"p\.jsonl:1"):
        load_prompts(str(file))
    with pytest.raises(ConfigError, match="neither a file"):
        load_prompts("gsm9k")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A results file with all that a report can show."""
    counts = DraftCounts(
        rounds=10, steps=10, committed=20, verified=40, accepted=10, verify_ms=100, draft_calls=10,
        accepted_at=(6, 3, 1), reached_at=(10, 6, 3), tau=0.25,
    )  # fmt: skip
    fast = turn_record(
        "fast", "2 streams", 0, Turn(0.5, (TEN_MS, TEN_MS)),
        closed_loop=False, counts=counts, step_table=([1, 8], [9.0, 12.0]),
    )  # fmt: skip
    file = tmp_path / "results.json"
    save(results(record("plain", 0, 1.0, TEN_MS, TWO_A_GAP), fast), file)
    return file


def test_a_result_is_read_back_as_it_was(run: Path):
    assert load(run).turns[1].counts.tau == 0.25
    assert [row.arm for row in summary(load(run))] == ["plain", "fast"]
    run.write_text("{}")
    with pytest.raises(ConfigError, match="not a result"):
        load(run)


def test_the_report_is_one_file_with_every_figure_and_the_table_is_markdown(run: Path):
    done = CliRunner().invoke(main, ["bench", "report", str(run)])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert "× plain" in lines[0]
    assert [cell.strip() for cell in lines[3].split("|")[1:5]] == ["2 streams", "fast", "44.0", "100.0"]
    assert "2.00× (2.00–2.00)" in lines[3]
    assert "75%" in lines[3]  # waste
    page = run.with_name("report.html").read_text()
    assert page.count("<svg") == 8
    loaded = re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"", page)
    assert [link for link in loaded if "xlink" not in link] == []


def test_the_tables_take_the_marked_place_of_a_document(run: Path):
    document = run.with_name("doc.md")
    document.write_text("a\n<!-- measured: begin -->\nold\n<!-- measured: end -->\nz\n")
    arguments = ["bench", "report", str(run), "--into", str(document)]
    for _ in range(2):  # again and again
        assert CliRunner().invoke(main, arguments).exit_code == 0
        text = document.read_text()
        assert (text[:2], text[-3:], text.count("| fast |"), "old" in text) == ("a\n", "\nz\n", 1, False)
    document.write_text("no place")
    assert "no <!-- measured: begin -->" in CliRunner().invoke(main, arguments).output


def test_serve_names_what_is_wrong_before_it_starts():
    for arguments, fault in (
        (["--arm", "a:model=m", "--baseline", "b"], "no such arm"),
        (["--arm", "a:model=m", "--arm", "a:model=n"], "names must differ"),
        (["--url", "http://127.0.0.1:1/v1"], "no model could be read"),
        (["--streams", "1,x"], "not a list of numbers"),
    ):
        done = CliRunner().invoke(main, ["bench", "serve", *arguments])
        assert done.exit_code == 2, done.output
        assert fault in done.output
