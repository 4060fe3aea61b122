"""The dashboard asks for metrics that there are."""

import json
import re
from pathlib import Path

from samebit.engine.metrics import ServerMetrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "grafana_dashboard.json").read_text())


def shown():
    metrics = ServerMetrics("x")
    metrics.set_engine_stats({"num_accepted_tokens_at_0": 1, "misses_cold": 1}, 0.0)
    metrics.refuse("queue_full")
    metrics.finish("stop", 1, 0.1)
    return metrics.render().decode()


def test_every_metric_of_the_dashboard_is_exported_with_the_labels_it_is_grouped_by():
    text = shown()
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(expressions) > 30
    for expression in expressions:
        names = re.findall(r"samebit:\w+", expression)
        assert names, expression
        for name in names:
            found = re.search(rf"^{name}\{{(.*)\}}", text, re.MULTILINE)
            assert found, name
            for label in re.findall(r"by \((\w+)\)", expression):
                assert f'{label}="' in found[1], expression


def test_panels_have_names_of_their_own_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["title"] for panel in panels}) == len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
