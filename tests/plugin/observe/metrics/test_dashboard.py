"""The dashboard and the alert rules name metrics and labels that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.observe.metrics import LABELS, METRICS

yaml = pytest.importorskip("yaml")

FOLDER = Path(str(files("kvarena.plugin.observe")))
RULES = FOLDER / "alerts.yaml"


def _scraped() -> dict[str, set[str]]:
    """Names as Prometheus has them, and their labels."""
    names = {}
    for name, (kind, _, own) in METRICS.items():
        labels = {*LABELS, *own}
        if kind == "counter":
            names[f"{name}_total"] = labels
        elif kind == "histogram":
            names |= {f"{name}_bucket": labels | {"le"}, f"{name}_sum": labels, f"{name}_count": labels}
        else:
            names[name] = labels
    return names


def _rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def _dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
    return loaded


def _expressions() -> Iterator[tuple[str, str]]:
    """Each with the text that is shown with it."""
    for rule in _rules():
        yield rule["expr"], " ".join(rule["annotations"].values()).replace("$labels.", "")
    for panel in _dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]


def _named(expression: str) -> set[str]:
    return set(re.findall(r"\bkvarena_\w+", expression))


def test_every_metric_that_is_named_exists() -> None:
    named = set().union(*(_named(expression) for expression, _ in _expressions()))
    assert len(named) > 15
    assert named <= set(_scraped())


def test_every_label_that_is_named_is_one_of_its_metric() -> None:
    for expression, text in _expressions():
        known = set.intersection(*(_scraped()[name] for name in _named(expression))) | {"instance"}
        shown = set(re.findall(r"{{\s*(\w+)\s*}}", text))
        inside = set(re.findall(r"(\w+)=~?\"", expression))
        for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            inside |= set(re.findall(r"\w+", group))
        if " on (" in expression:  # what is shown is the left side's
            known |= _scraped()[re.findall(r"\bkvarena_\w+", expression)[0]]
        assert shown | inside <= known, expression


def test_the_dashboard_has_a_datasource_and_panels_that_do_not_overlap() -> None:
    board = _dashboard()
    assert [each["name"] for each in board["templating"]["list"]] == ["datasource", "role", "model"]
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"])
    cells = [(each["gridPos"]["x"], each["gridPos"]["y"]) for each in board["panels"]]
    assert len(set(cells)) == len(cells)


def test_prometheus_takes_the_rules() -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    done = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
