"""Collapse: when it is told, that it is told once, and what it looks like in a run that really collapses."""

from pathlib import Path

import pytest
import torch
from helpers import unit, write_npz
from runs import TINY, metrics, state

import cmsf
from cmsf.analysis.collapse import CHECKS, SPREAD_FLOOR, CollapseDetector, EmbeddingStats, effective_rank
from cmsf.utils.screen import Screen

COLLAPSING = TINY | {"epochs": 20, "batch_size": 48, "log_every": 1, "weight_decay": 10.0, "evaluate_every": 0}
"""Decay that leaves nothing of the weights."""


@pytest.fixture(scope="module")
def bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_npz(tmp_path_factory.mktemp("data") / "bars.npz")


def test_the_effective_rank_counts_directions() -> None:
    line = torch.outer(torch.linspace(-1, 1, 50), unit(1, 8, 0)[0].float())
    assert effective_rank(line + 3) == pytest.approx(1, abs=1e-4)
    generator = torch.Generator().manual_seed(0)
    plane = torch.randn(1000, 2, generator=generator) @ torch.linalg.qr(torch.randn(8, 2, generator=generator)).Q.T
    assert effective_rank(plane) == pytest.approx(2, abs=0.01)
    assert effective_rank(torch.randn(4000, 16, generator=generator)) == pytest.approx(16, abs=0.05)
    wide = torch.randn(5, 100, generator=generator)
    assert effective_rank(wide) == pytest.approx(4, abs=0.1)  # five points, centred
    assert effective_rank(torch.ones(10, 4)) == 0
    assert torch.isnan(torch.tensor(effective_rank(torch.full((4, 4), torch.nan))))


def test_the_effective_rank_is_that_of_the_singular_values() -> None:
    rows = unit(40, 12, 3)
    singular = torch.linalg.svdvals(rows - rows.mean(0))
    share = singular / singular.sum()
    assert effective_rank(rows) == pytest.approx(float((-(share * share.log()).sum()).exp()), rel=1e-9)


def test_a_few_low_looks_are_no_collapse_and_more_are_one() -> None:
    watch, low, fine = CollapseDetector(), EmbeddingStats(SPREAD_FLOOR / 2, 5.0), EmbeddingStats(0.17, 2.0)
    for looks in (CHECKS - 1, CHECKS - 1):
        assert [watch.update(low) for _ in range(looks)] == [None] * looks
        assert watch.update(fine) is None
    said = [watch.update(low) for _ in range(CHECKS)][-1]
    assert said is not None
    assert "spread 0.0100, healthy is above 0.02" in said
    again = CollapseDetector()
    again.load_state_dict(watch.state_dict())
    assert again == watch


def test_embeddings_on_one_line_are_a_collapse_but_not_where_two_classes_are_told_apart() -> None:
    line = EmbeddingStats(0.9, 1.2)
    assert "effective rank 1.20" in str(
        [CollapseDetector().update(line), *map(CollapseDetector(below=4).update, [line])][-1]
    )
    watch = CollapseDetector(min_rank=0.0)
    assert [watch.update(line) for _ in range(20)] == [None] * 20


class Listening(Screen):
    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.said: list[str] = []

    def print(self, text: str) -> None:
        self.said.append(text)


@pytest.mark.usefixtures("one_thread")
def test_a_run_that_collapses_stops_after_a_checkpoint_or_is_warned_of_once(bars: Path, tmp_path: Path) -> None:
    with pytest.raises(cmsf.BadInput, match=r"nearly the same .* with --on-collapse warn, the same command resumes"):
        cmsf.train("byol-small", bars, tmp_path / "run", quiet=True, on_collapse="stop", **COLLAPSING)
    run = cmsf.Run(tmp_path / "run")
    assert state(run)["progress"]["step"] == metrics(run, "step")[-1]["step"] < 60
    assert metrics(run, "epoch")[0]["spread"] > 0.5
    with pytest.raises(cmsf.BadInput, match="nearly the same"):
        cmsf.resume(run.path, quiet=True, on_collapse="stop")
    screen = Listening()
    cmsf.resume(run.path, screen=screen)
    assert metrics(run, "epoch")[-1]["spread"] < SPREAD_FLOOR
    assert sum("WARNING: the embeddings of all images have become nearly the same" in text for text in screen.said) == 1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("method", ["cmsf-self", "supcon"])
def test_a_healthy_run_of_two_classes_is_not_near_the_floors(method: str, tmp_path: Path) -> None:
    two, screen = write_npz(tmp_path / "two.npz", per_class=80, classes=2), Listening()
    settings = TINY | {"epochs": 6, "log_every": 1}
    run = cmsf.train(f"{method}-small", two, tmp_path / "run", screen=screen, on_collapse="stop", **settings)
    assert not any("WARNING" in text for text in screen.said)
    assert min(line["spread"] for line in metrics(run, "step")) > 5 * SPREAD_FLOOR
