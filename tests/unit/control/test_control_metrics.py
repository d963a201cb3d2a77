"""The metrics table is what the documentation and the dashboard say."""

import json
import re
from pathlib import Path

from helpers import verifier

from dspark_ray.control.metrics import METRICS, SAMPLE_METRICS, markdown_table

GRAFANA = Path(__file__).parents[3] / "cluster/grafana"
DASHBOARD = json.loads((GRAFANA / "dspark-control.json").read_text())


def dashboard_queries() -> list[str]:
    """Every query of the dashboard, of panels and variables."""
    queries = [t["expr"] for panel in DASHBOARD["panels"] for t in panel["targets"]]
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    return queries + variables


def test_every_query_names_metrics_of_the_table_and_their_tags() -> None:
    known = {m.exported_name: m for m in METRICS}
    used = set()
    for query in dashboard_queries():
        names = re.findall(r"ray_\w+", query)
        assert names, query
        used |= set(names)
        for name in names:
            assert name in known, f"{name} is not exported"
            tags = re.search(name + r"\{([^}]*)\}", query)
            labels = set(re.findall(r"(\w+)=", tags[1])) if tags else set()
            assert labels <= set(known[name].tags), query
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(group.split(", ")) <= set(known[names[0]].tags), query
    assert used == known.keys(), "each metric has its place in the dashboard"


def test_the_documentation_has_the_table() -> None:
    assert markdown_table() in (GRAFANA / "README.md").read_text()


def test_names_are_unique_and_say_their_unit() -> None:
    names = [m.name for m in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"dspark_[a-z_]+", metric.name)
        if metric.unit in {"seconds", "bytes"}:
            assert metric.name.endswith(f"_{metric.unit}")


def test_samples_hold_what_is_exported() -> None:
    sample = verifier(tokens_verified=10, tokens_accepted=7, kv_blocks_used=25, policy_local=True)
    values = {m.name: m.read(sample) for m in SAMPLE_METRICS if m.read is not None}
    assert values["dspark_tokens_wasted"] == 3
    assert values["dspark_kv_used_ratio"] == 0.25
    assert values["dspark_policy_local"] == 1.0
    assert len(values) == len(SAMPLE_METRICS)
