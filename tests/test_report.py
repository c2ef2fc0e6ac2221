"""cmsf report: one page of what a run has learned, from what the run has written and from a look at its images."""

import json
import math
import re
import shutil
import signal
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers import write_npz, write_photos
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from runs import TINY, StopAt, metrics
from torch import Tensor

import cmsf
from cmsf.analysis.label_issues import compare_with_truth
from cmsf.analysis.neighbor_graph import build_graph
from cmsf.analysis.per_class import class_report
from cmsf.cli import main
from cmsf.data import Dataset, Split
from cmsf.evaluation import FeatureExtractor
from cmsf.evaluation.knn import k_nearest
from cmsf.report.collect import collect_run
from cmsf.report.compare import comparison_plots
from cmsf.report.contents import Report, RunReport
from cmsf.report.history import collect_history
from cmsf.report.image_pool import EmbeddedImages, PoolBuilder
from cmsf.report.page import render
from cmsf.report.plots import COLOURS, training_plots
from cmsf.report.write import LARGEST, LiveReport, write_report
from cmsf.runs.cost import RunCost, run_cost
from cmsf.training.signals import Stopped
from cmsf.utils.constants import UNKNOWN

pytestmark = pytest.mark.usefixtures("one_thread")
HERE = ("cpu", 0, pytest.fail)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    folder = tmp_path_factory.mktemp("report")
    return cmsf.train("cmsf-self-small", write_npz(folder / "bars.npz"), folder / "run", quiet=True, **TINY)


def test_a_report_shows_what_the_log_says_and_what_the_run_calls_related(run: cmsf.Run) -> None:
    report, last = collect_run(run, 60, *HERE), metrics(run, "epoch")[-1]
    summary = {figure.label: figure.value for figure in report.summary}
    assert summary["20-NN"] == f"{last['20-nn']:.2f} %"
    assert summary["purity"] == f"{100 * last['purity_constrained']:.0f} %"
    assert summary["median rank"] == f"{last['rank_median']:.0f}"
    assert {"loss", "accuracy", "purity", "rank", "spread", "rank-by-size"} <= {plot.name for plot in report.plots}
    assert [gallery.title for gallery in report.galleries] == [
        "Test images and their nearest training images",
        "Neighbours in the constrained set",
        "Neighbours in the older bank",
    ]
    assert report.state == "complete"
    assert report.classes is not None
    assert {row.name for row in report.classes.rows} == set(run.data().classes)
    assert report.compute["epochs"] == "3 of 3"


def test_a_figure_that_rests_on_hidden_labels_says_so_in_log_and_report(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = TINY | {"epochs": 1, "labels_per_class": 2}
    few = cmsf.train("cmsf-semi-small", write_npz(tmp_path / "bars.npz"), tmp_path / "run", **given)
    assert capsys.readouterr().err.count("k-NN in the log votes with the true labels of all 144 training images") == 1
    notes = [{stat.label: stat.note for stat in collect_history(each).summary}["20-NN"] for each in (few, run)]
    assert "votes: the true labels of all 144 training images, not those training had" in notes[0]
    assert "votes" not in notes[1]


def test_the_features_are_searched_once_for_all_parts_of_the_page(
    run: cmsf.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches = []

    def counted(query: Tensor, train: Tensor, k: int, own: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        searches.append((len(query), len(train), k))
        return k_nearest(query, train, k, own)

    for module in ("neighbor_graph", "per_class", "label_issues"):
        monkeypatch.setattr(f"cmsf.analysis.{module}.k_nearest", counted)
    report, data = collect_run(run, 60, *HERE), run.data()
    assert data.test is not None
    train, test = len(data.train), len(data.test)
    assert searches == [(train, train, min(100, train - 1)), (test, train, min(100, train - 1))]
    monkeypatch.undo()
    extractor = FeatureExtractor(run.backbone(), run.preprocessing)
    features = (extractor(data.train), data.train.truth, extractor(data.test), data.test.truth)
    assert report.classes == class_report(data.classes, *features)


def test_every_image_of_the_page_has_its_neighbours_there_and_marks_are_right(run: cmsf.Run) -> None:
    report, data = collect_run(run, 60, *HERE), run.data()
    pool = report.images
    assert pool is not None
    truth = {path: data.classes[int(number)] for path, number in zip(data.train.paths, data.train.truth, strict=True)}
    for image, near in enumerate(pool.near):
        assert near
        assert image not in [one for one, _ in near]
        assert [s for _, s in near] == sorted((s for _, s in near), reverse=True)
    assert any(pool.exact)
    for gallery in report.galleries:
        for row in gallery.rows:
            for item in (item for strip in row.strips for item in strip.items):
                assert pool.split[item.image] == "train"
                assert pool.classes[pool.truth[item.image]] == truth[pool.path[item.image]]
                assert item.wrong == (pool.truth[item.image] != pool.truth[row.query])
                assert item.rank is None or item.rank > 1


def test_the_command_writes_one_page_without_network_and_each_plot_twice(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both.html"
    assert main(["report", str(run.path), "--out", str(out), "--threads", "1"]) == 0
    assert str(out) in capsys.readouterr().out
    page = out.read_text()
    assert len(page.encode()) < LARGEST
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    plots = tmp_path / "both-plots"
    assert {file.suffix for file in plots.iterdir()} == {".png", ".svg"}
    assert {"purity.svg", "confusion.png", "map-pca.svg"} <= {file.name for file in plots.iterdir()}
    assert (plots / "purity.svg").read_text().startswith("<svg")
    assert re.findall(r'data-plot="(confusion|map-pca)"', page) == ["confusion"]


def test_several_runs_stand_side_by_side(run: cmsf.Run, tmp_path: Path) -> None:
    other = cmsf.train("msf-small", run.folder.data_config().data, tmp_path / "other", quiet=True, **TINY)
    plots = write_report([run, other], tmp_path / "two.html", *HERE)
    page = (tmp_path / "two.html").read_text()
    assert "cmsf-self-small" in page
    assert "msf-small" in page
    assert {folder.name for folder in plots.iterdir() if folder.is_dir()} == {"run-1", "run-2"}
    together = {file.name for file in plots.iterdir() if file.is_file()}
    assert together == {
        f"{name}.{kind}" for name in ("accuracy-of-all", "purity-of-all", "compute-20-nn") for kind in ("png", "svg")
    }
    compared = page.split('id="comparison"')[1].split("</section>")[0]
    assert re.findall(r'data-plot="([^"]+)"', compared) == ["accuracy-of-all", "purity-of-all", "compute-20-nn"]
    drawn = compared.split('data-plot="compute-20-nn"')[1].split("</figure>")[0]
    assert {"1 cmsf-self-small", "2 msf-small"} <= set(re.findall(r"<text[^>]*>([^<]+)</text>", drawn))
    ids = re.findall(r'<[^>]* id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_run_without_checkpoints_says_why_its_bank_is_not_shown(run: cmsf.Run, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    report = collect_run(cmsf.Run(tmp_path / "run"), 60, *HERE)
    assert any("has no checkpoint of this version" in note for note in report.notes)
    assert [gallery.title for gallery in report.galleries] == ["Test images and their nearest training images"]


def test_runs_are_numbered_and_those_of_one_recipe_told_apart_by_their_folders(run: cmsf.Run, tmp_path: Path) -> None:
    twins = []
    for place in ("one/run", "two/run", "two/other"):
        shutil.copytree(run.path, tmp_path / place)
        twins.append(cmsf.Run(tmp_path / place))
    write_report(twins, tmp_path / "three.html", *HERE)
    page = (tmp_path / "three.html").read_text()
    named = [f"{number} cmsf-self-small · {name}" for number, name in enumerate(("run", "run", "other"), start=1)]
    assert re.findall(r"<strong><bdi>([^<]+)</bdi></strong>", page) == named
    assert "tested on different images" not in page


def test_the_page_counts_its_suspects_and_shows_each_that_it_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = 0.2  # so little has learned little
    monkeypatch.setattr("cmsf.report.collect.THRESHOLD", least)
    data = write_npz(tmp_path / "bars.npz", per_class=40)
    noisy = cmsf.train("cmsf-sup-small", data, tmp_path / "run", quiet=True, **TINY | {"label_noise": 0.3})
    report = collect_run(noisy, 40, *HERE)
    every = noisy.suspects(least=0.0)
    hits = compare_with_truth(every, least)
    assert hits is not None
    found = sum(one.score >= least for one in every)
    for (_, listed), suspect in zip(report.suspects, every, strict=False):  # by the page's one search, and by their own
        assert (listed.path, listed.suggested) == (suspect.path, suspect.suggested)
        assert listed.score == pytest.approx(suspect.score)
    assert found > len(report.suspects) == 10
    assert f"{found} of {len(every)} labels have a score of 0.2" in report.about_suspects
    assert "The likeliest 10 are here" in report.about_suspects
    assert f"{100 * hits.recall:.1f} % of the wrong ones" in report.about_suspects
    assert report.images is not None
    assert [report.images.path[image] for image, _ in report.suspects] == [one.path for _, one in report.suspects]
    assert report.images.total == len(noisy.data().train) + len(noisy.data().test or ())


def test_runs_that_were_tested_on_other_images_say_so(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = cmsf.train(
        "msf-small", write_npz(tmp_path / "bars.npz", per_class=30), tmp_path / "run", quiet=True, **TINY
    )
    write_report([run, other], tmp_path / "two.html", *HERE)
    page = (tmp_path / "two.html").read_text()
    assert "These runs were tested on different images" in page
    differ = re.sub(r"<[^>]+>", " ", page.split("Settings that differ")[1].split("</table>")[0]).split()
    assert "constraint" in differ
    assert "epochs" not in differ
    assert main(["flops", str(run.path), str(other.path), "--out", str(tmp_path / "two.png")]) == 0
    assert "These runs were tested on different images" in capsys.readouterr().out


def logged(name: str, epochs: Sequence[dict[str, Any]], cost: RunCost | None = None) -> RunReport:
    return RunReport(name, "", "complete", epochs=epochs, spent=cost)


def test_plots_of_many_runs_have_a_look_for_each_and_their_names_inside(tmp_path: Path) -> None:
    epochs = [{"epoch": epoch, "20-nn": 50.0 + epoch} for epoch in (0, 10**9)]
    names = [f"{n} {'run with a long name ' * 4}{n}" for n in range(24)]
    (drawing,) = comparison_plots([logged(name, epochs) for name in names])
    (strange,) = comparison_plots([logged(name, epochs) for name in ("1 \N{WOMAN}", "2 \N{DESERET SMALL LETTER YEE}")])
    with warnings.catch_warnings(action="error"):
        strange.save(tmp_path)
        assert strange.svg
    canvas = FigureCanvasAgg(drawing.figure)
    with warnings.catch_warnings(action="error"):
        canvas.draw()
    (axes,) = drawing.figure.axes
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 24
    (legend,) = drawing.figure.legends
    assert len({text.get_text() for text in legend.get_texts()}) == 24
    box, whole = legend.get_window_extent(canvas.get_renderer()), drawing.figure.bbox
    assert box.x0 >= 0
    assert box.x1 <= whole.x1
    assert axes.bbox.height > 1.5 * drawing.figure.dpi
    assert not axes.bbox.overlaps(box)


def test_runs_that_say_nothing_beside_others_keep_their_colours(run: cmsf.Run) -> None:
    lines, cost = [{"epoch": 0, "20-nn": 50.0, "purity_unconstrained": 0.5}], run_cost(run.folder)
    together = comparison_plots(
        [
            logged("1 a", lines, cost),
            logged("2 b", []),
            logged("3 c", lines, cost),
            logged("4 d", [{"epoch": 1, "20-nn": math.nan}]),
        ]
    )
    accuracy, purity, compute = (drawing.figure.axes[0] for drawing in together)
    assert [line.get_color() for line in purity.lines] == [COLOURS[0], COLOURS[2]]
    assert [line.get_color() for line in accuracy.lines][:2] == [COLOURS[0], COLOURS[2]]
    assert [to_hex(point.get_facecolor()) for point in compute.collections] == [COLOURS[0], COLOURS[2]]


def test_a_run_that_is_being_trained_has_a_page_that_looks_for_a_newer_one(tmp_path: Path) -> None:
    bars, out = write_npz(tmp_path / "bars.npz"), tmp_path / "run"
    with pytest.raises(Stopped):
        cmsf.train("cmsf-self-small", bars, out, screen=StopAt(6, signal.SIGTERM), report=True, **TINY)
    half = (out / "report.html").read_text()
    assert ">epoch 1 of 3<" in half
    assert 'data-live="true"' in half or "location.reload" in half
    report = collect_run(cmsf.Run(out), 60, *HERE)
    assert report.images is None
    assert report.state == "stopped after epoch 1 of 3"
    assert any("its training is not complete" in note for note in report.notes)
    cmsf.train("cmsf-self-small", bars, out, quiet=True, report=True, **TINY)
    assert "complete" in (out / "report.html").read_text()


class ReadKeys(dict[str, Any]):
    """A line of a log that remembers which of its keys were asked for."""

    read: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@pytest.fixture(scope="module")
def semi(tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    folder = tmp_path_factory.mktemp("semi")
    given = TINY | {"labels_per_class": 4}
    return cmsf.train("cmsf-semi-small", write_npz(folder / "bars.npz"), folder / "run", quiet=True, **given)


def test_the_pseudo_labels_of_all_images_have_their_curve(semi: cmsf.Run) -> None:
    lines = metrics(semi, "epoch")
    (plot,) = (plot for plot in training_plots(lines) if plot.name == "pseudo-labels")
    curves = {line.get_label(): list(line.get_ydata()) for line in plot.figure.axes[0].lines}
    assert curves["right, of all"] == [line["pseudo_accuracy_all"] for line in lines]
    assert set(curves) == {"right, of all", "right, of the confident", "confident"}


def test_every_key_that_a_plot_reads_is_one_that_a_log_has(run: cmsf.Run, semi: cmsf.Run, tmp_path: Path) -> None:
    supervised = cmsf.train("xent-small", run.folder.data_config().data, tmp_path / "run", quiet=True, **TINY)
    logs = [metrics(trained, "epoch") for trained in (run, semi, supervised)]
    read = [[ReadKeys(line) for line in log] for log in logs]
    for log in read:
        training_plots(log)
    comparison_plots([logged(str(number), log) for number, log in enumerate(read)])
    assert {"loss", "pseudo_accuracy_all", "classifier", "rank_histogram"} <= ReadKeys.read
    judged = {"held_out", "view_agreement"}  # tests/test_adapt.py has runs that log them
    assert ReadKeys.read - judged <= {key for log in logs for line in log for key in line}


def test_unlabelled_photos_have_a_report_that_says_what_is_missing(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", per_class=24, classes=1, side=24)
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(photos.rglob("*.*"))):
        file.rename(flat / f"{number}{file.suffix}")
    run = cmsf.train("cmsf-self-small", flat, tmp_path / "run", quiet=True, **TINY | {"batch_size": 8})
    report = collect_run(run, 60, *HERE)
    assert report.classes is None
    assert report.suspects == ()
    assert any("no true class is known" in note for note in report.notes)
    assert report.images is not None
    assert "purity" not in {plot.name for plot in report.plots}


def test_what_is_no_run_or_says_nonsense_is_told_in_a_line(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "no such run" in capsys.readouterr().err
    assert main(["report", str(run.path), "--out", str(tmp_path / "report.pdf")]) == 2
    assert "expected a .html or .htm file" in capsys.readouterr().err
    assert main(["report", str(run.path), "--out", str(tmp_path / "no" / "report.html")]) == 2
    assert "expected a file in an existing folder" in capsys.readouterr().err
    run.folder.results.mkdir(exist_ok=True)
    (run.folder.results / "odd.json").write_text("{}")
    assert any("odd.json is not what cmsf evaluate wrote" in note for note in collect_history(run).notes)
    (run.folder.results / "odd.json").unlink()
    kept = run.folder.metrics_file.read_text()
    run.folder.metrics_file.write_text(kept + json.dumps({"kind": "epoch", "epoch": "last"}) + "\n")
    with pytest.raises(cmsf.BadInput, match=r"metrics\.jsonl"):
        collect_history(run)
    run.folder.metrics_file.write_text(kept)


@pytest.mark.parametrize(
    "nonsense",
    [
        {"loss": 10**400},
        {"loss": 1e308, "loss_\ud800": -1e308, "loss_other": True},
        {"rank_histogram": 5},
        {"rank_histogram": ["a", "b"]},
        {"rank_histogram": [1, -1]},
        {"rank_histogram": [10**400] * 100},
        {"20-nn": "<script>alert(1)</script>", "purity_constrained": [], "images_per_second": -1},
    ],
)
def test_whatever_a_log_says_there_is_a_page(nonsense: dict[str, object], run: cmsf.Run) -> None:
    kept = run.folder.metrics_file.read_text()
    line = {"kind": "epoch", "step": 12, "epoch": 2, **nonsense}
    try:
        run.folder.metrics_file.write_text(kept + json.dumps(line) + "\n")
        report = collect_history(run)
        assert "<script>alert" not in render(Report((report,), "now", "0"))
        assert any("its cost cannot be computed" in note for note in report.notes)
    finally:
        run.folder.metrics_file.write_text(kept)


def test_a_coarse_label_that_is_right_is_not_called_wrong() -> None:
    truth, label = torch.tensor([0, 2, 1, 2, 0]), torch.tensor([0, 1, 0, 0, UNKNOWN])
    split = Split(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), list("abcde"), truth, label)
    groups = {"cat": "animal", "dog": "animal", "car": "machine"}
    data = Dataset("coarse", ("cat", "dog", "car"), ("animal", "machine"), split, None, "none", groups=groups)
    features = torch.nn.functional.normalize(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    graph = build_graph(features, None, 3)
    builder = PoolBuilder(EmbeddedImages(data, features, graph), 5)
    builder.add_with_neighbours(range(5))
    pool = builder.build()
    order = [pool.path.index(name) for name in "abcde"]
    assert [pool.wrong[i] for i in order] == [False, False, False, True, None]
    assert [pool.classes[pool.label[i]] for i in order[:4]] == ["animal", "machine", "animal", "animal"]


def test_what_goes_wrong_with_a_page_does_not_stop_a_run(tmp_path: Path) -> None:
    bars, out, said = write_npz(tmp_path / "bars.npz"), tmp_path / "run", []
    with pytest.raises(Stopped):
        cmsf.train("cmsf-self-small", bars, out, screen=StopAt(2, signal.SIGTERM), **TINY)
    (out / "report.html").mkdir()
    live = LiveReport(cmsf.Run(out).folder, said.append)
    live()
    assert len(said) == 1
    assert "the report was not updated" in said[0]
    with pytest.raises(cmsf.BadInput, match="cannot write"):
        write_report([cmsf.Run(out)], out / "report.html", *HERE)
