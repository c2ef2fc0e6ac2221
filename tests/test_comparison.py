"""Tables of results for papers and pages."""

from typing import Any

import pytest

from cmsf.cli.comparison import Comparison


def figure(value: float, half: float, quoted: str = "accuracy") -> dict[str, Any]:
    return {"quoted": quoted, quoted: {"value": value, "low": value - half, "high": value + half}}


@pytest.fixture
def comparison() -> Comparison:
    found = Comparison("accuracy, %")
    found.add("runs/a_b", {"20-nn": figure(85.754, 1.5), "1 % linear": figure(70, 2)})
    found.add("runs/x|y", {"20-nn": figure(60, 0.25), "pets": figure(50, 1, "mean per class")})
    return found


def test_a_mean_per_class_is_marked_and_said(comparison: Comparison) -> None:
    comparison.caption("2 images")
    assert comparison.title == "accuracy on 2 images, %, ± half of its 95 % interval; *: mean per class"


def test_markdown_has_a_row_a_run_and_a_dash_where_nothing_was_measured(comparison: Comparison) -> None:
    assert comparison.markdown().splitlines() == [
        "accuracy, %",
        "",
        "|  | 20-NN | 1 % linear | pets* |",
        "| --- | ---: | ---: | ---: |",
        "| runs/a_b | 85.75 ± 1.5 | 70.00 ± 2.0 | – |",
        "| runs/x\\|y | 60.00 ± 0.2 | – | 50.00 ± 1.0 |",
    ]


def test_latex_is_a_booktabs_table_with_nothing_left_to_escape(comparison: Comparison) -> None:
    lines = comparison.latex().splitlines()
    assert lines[1:6] == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r" & 20-NN & 1 \% linear & pets* \\",
        r"\midrule",
        r"runs/a\_b & 85.75 $\pm$ 1.5 & 70.00 $\pm$ 2.0 & -- \\",
    ]
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]


@pytest.mark.parametrize(("width", "first"), [("200", "runs/a_b"), ("46", "20-NN")])
def test_a_table_too_wide_for_the_terminal_is_turned(
    width: str, first: str, comparison: Comparison, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    comparison.show("table")
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert rows[0].split()[1] == first
    assert any("85.75 ± 1.5" in row for row in rows)
