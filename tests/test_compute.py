"""What training costs: the paper's table from its inputs, and recipes and runs by the same equation."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from helpers import write_npz
from matplotlib.backends.backend_agg import FigureCanvasAgg
from runs import TINY, metrics
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import cmsf
from cmsf.analysis.compute import PAPERS_PASS, Compute, Passes, share_of_pass
from cmsf.analysis.figures import compute as compute_figure
from cmsf.analysis.figures.compute import Point, draw_runs, published_points
from cmsf.analysis.published import IMAGENET_IMAGES, MULTI_CROP, SELF_SUPERVISED, SEMI_SUPERVISED, SMALL_CROP
from cmsf.cli import main
from cmsf.data.transforms import WholeBatch
from cmsf.method.build import make_learner
from cmsf.models.backbones import make_backbone
from cmsf.recipes import get_recipe
from cmsf.report.compare import accuracy_points
from cmsf.runs.cost import Reached, clean_views_of, compute_of, multiply_adds, run_cost
from cmsf.runs.folder import RunFolder
from cmsf.runs.listing import Listing
from cmsf.training.resolve import expected
from cmsf.utils.errors import BadInput


def total_flops(compute: Compute) -> tuple[float, float]:
    """The supplement's equation as it stands there, image by image: all passes, and FLOPs."""
    passes = flops = 0.0
    for _ in range(compute.iterations):
        for part in (compute.unlabelled, compute.labelled):
            for _ in range(part.batch):
                passes += part.forward + part.backward
                flops += part.forward * compute.per_pass + 2 * part.backward * compute.per_pass
    return passes, flops


@pytest.mark.parametrize("labelled", [Passes(), Passes(1, 1, 5), Passes(2, 0.5, 3)])
def test_passes_and_flops_are_the_sum_over_every_image_of_every_step(labelled: Passes) -> None:
    compute = Compute(Passes(3.1, 2.5, 7), 11, labelled, per_pass=13.0)
    assert (compute.passes, compute.flops) == pytest.approx(total_flops(compute))
    assert compute.mini_batch * compute.iterations == pytest.approx(compute.passes)


def test_a_small_crop_counts_by_its_area() -> None:
    assert share_of_pass(96) == pytest.approx(0.184, abs=5e-4)  # the paper's own example
    assert round(2 + 6 * share_of_pass(SMALL_CROP), 1) == MULTI_CROP  # SwAV's and PAWS's


COMPUTED = {
    "Mean Shift": (768, 7.686, 3.997),
    "BYOL": (24576, 76.677, 39.872),
    "SwAV": (25395.2, 63.386, 37.081),
    "SimCLRv2": (16384, 40.894, 23.923),
    "UDA": (47104, 18.842, 9.824),
    "FixMatch": (17408, 13.056, 6.889),
    "MPL": (10752, 53.760, 29.453),
    "PAWS (sup=6720)": (38835.2, 36.350, 21.265),
    "PAWS (sup=1680)": (4947.2, 24.756, 14.482),
    "PAWS (sup=400)": (2387.2, 11.946, 6.988),
    "CMSF semi-basic": (768, 7.686, 3.997),
    "CMSF semi": (768, 7.686, 3.997),
    "CMSF semi, mixed": (2304, 7.686, 3.997),
}
"""By hand: mini-batch, passes in 1e8, FLOPs in 1e18."""


def test_every_row_of_the_papers_table_follows_from_its_inputs() -> None:
    found = {row.name: row.calculation.compute for row in SEMI_SUPERVISED if row.calculation is not None}
    assert found.keys() == COMPUTED.keys()
    for name, compute in found.items():
        figures = (compute.mini_batch, compute.passes / 1e8, compute.flops / 1e18)
        assert figures == pytest.approx(COMPUTED[name], abs=5e-4)
        assert compute.per_pass == PAPERS_PASS


def test_the_self_supervised_table_costs_what_the_supplement_says_of_the_same_methods() -> None:
    def flops(name: str, epochs: int, multi_crop: bool = False) -> float:
        rows = [
            row for row in SELF_SUPERVISED if (row.name, row.epochs, "m" in row.marks) == (name, epochs, multi_crop)
        ]
        assert rows[0].compute is not None
        return rows[0].compute.flops / 1e18

    assert flops("BYOL", 1000) == pytest.approx(39.872, abs=5e-4)
    assert flops("SwAV", 800, multi_crop=True) == pytest.approx(37.081, abs=5e-4)
    assert flops("MSF (256K)", 200) == flops("CMSF self (128K)", 200) == pytest.approx(3.997, abs=5e-4)
    assert flops("CMSF self (128K)", 200, multi_crop=True) == pytest.approx(6.199, abs=5e-4)  # four small crops


# Recipes and runs


def counted(name: str, images: int = IMAGENET_IMAGES, side: int = 28, **changes: Any) -> Compute:
    return compute_of(expected(get_recipe(name).changed(changes), images, side), images)


@pytest.mark.parametrize(
    ("recipe", "row"),
    [
        ("msf-imagenet", "Mean Shift"),
        ("cmsf-semi-imagenet", "CMSF semi"),
        ("cmsf-semi-basic-imagenet", "CMSF semi-basic"),
        ("paws-imagenet", "PAWS (sup=6720)"),
        ("paws+support-400-imagenet", "PAWS (sup=400)"),
    ],
)
def test_a_recipe_of_the_papers_scale_passes_as_often_as_the_papers_table_says(recipe: str, row: str) -> None:
    mine, theirs = counted(recipe), next(one.calculation for one in SEMI_SUPERVISED if one.name == row)
    assert theirs is not None
    assert mine.iterations == theirs.compute.iterations
    assert mine.labelled == theirs.compute.labelled
    assert mine.passes == pytest.approx(theirs.compute.passes, rel=1e-3)  # the paper's 3.1 is 3.102
    assert mine.flops / mine.per_pass == pytest.approx(theirs.compute.flops / PAPERS_PASS, rel=1e-3)


@pytest.mark.parametrize(
    ("recipe", "changes", "forward", "backward", "beside"),
    [
        ("cmsf-self-small", {}, 2, 1, 0),
        ("cmsf-self-small", {"companions": "third-view"}, 3, 1, 0),
        ("msf-small", {"extra_crops": 4, "size": 56, "extra_size": 28}, 3, 2, 0),
        ("xent-small", {}, 1, 1, 0),  # it has no target
        ("byol-sym-small", {}, 4, 2, 0),
        ("simclr-small", {}, 2, 2, 0),
        ("simsiam-small", {}, 2, 2, 0),
        ("moco-v2-small", {}, 2, 1, 0),
        ("fixmatch-small", {}, 2, 2, 64),  # the paper's is 2, 1: see `cmsf.runs.cost`
        ("paws-small", {}, 2, 2, 640),
        ("paws-small", {"support_classes": 4, "support_images": 3}, 2, 2, 12),
    ],
)
def test_passes_are_those_that_the_objective_declares(
    recipe: str, changes: dict[str, Any], forward: float, backward: float, beside: int
) -> None:
    compute = counted(recipe, 1000, **changes)
    assert (compute.unlabelled.forward, compute.unlabelled.backward) == (forward, backward)
    assert compute.labelled == (Passes(1, 1, beside) if beside else Passes())
    assert compute.unlabelled.batch == 128
    assert compute.iterations == 1000 // 128 * 20


@pytest.mark.parametrize(("changes", "passed"), [({}, 3), ({"companions": "third-view"}, 4), ({"extra_crops": 2}, 4)])
def test_a_step_passes_as_often_as_is_counted(changes: dict[str, Any], passed: float) -> None:
    recipe = expected(
        get_recipe("cmsf-self-small").changed({"size": 16, "extra_size": 8, "batch_size": 4} | changes), 12, 16
    )
    learner = make_learner(recipe, torch.zeros(12, dtype=torch.int64), "cpu")
    seen: list[float] = []
    for encoder, weight in ((learner.encoders.online, 2), (learner.encoders.target, 1)):
        assert encoder is not None

        def look(_: nn.Module, images: tuple[Tensor], weight: int = weight) -> None:
            seen.append(weight * len(images[0]) * share_of_pass(images[0].shape[-1], recipe.size))

        encoder.backbone.register_forward_pre_hook(look)
    images = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)
    learner.step(WholeBatch(torch.arange(4), 0, 0, images), 0.99)
    assert sum(seen) == 4 * passed
    assert compute_of(recipe, 12).mini_batch == 4 * passed


def test_multiply_adds_of_small_convolutions_are_those_counted_by_hand() -> None:
    side, stem, (a, b, c, d) = 8, 3, (16, 32, 64, 128)
    by_hand = side**2 * 9 * stem * a + side**2 * 2 * 9 * a * a
    for inputs, outputs, pixels in ((a, b, 4**2), (b, c, 2**2), (c, d, 1)):
        by_hand += pixels * (9 * inputs * outputs + 9 * outputs * outputs + inputs * outputs)
    assert multiply_adds("small-residual", "standard", side) == by_hand


def test_resnet_50_has_4_09e9_and_with_the_strides_of_the_paper_it_cites_3_86e9() -> None:
    assert multiply_adds("resnet50", "standard", 224) == pytest.approx(4.09e9, rel=1e-3)
    with torch.device("meta"):
        network = make_backbone("resnet50").requires_grad_(False)
        for block in network.modules():
            if hasattr(block, "conv3"):
                block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)
        with FlopCounterMode(display=False) as counter:
            network.eval()(torch.zeros(1, 3, 224, 224))
    assert counter.get_total_flops() / 2 == pytest.approx(3.86e9, rel=2e-3)
    assert round(counter.get_total_flops() / 2, -8) == PAPERS_PASS


def test_counting_leaves_random_numbers_as_they_are() -> None:
    torch.manual_seed(0)
    first = torch.rand(1)
    torch.manual_seed(0)
    multiply_adds.cache_clear()
    counted("cmsf-self-small", 100)
    assert torch.rand(1) == first


@pytest.mark.parametrize(("images", "times"), [(640, 5), (128, 2)])
def test_the_offline_cache_passes_the_labelled_images_in_the_middle_of_an_epoch_and_between_two(
    images: int, times: int
) -> None:
    offline = {"pseudo_cache": "offline", "epochs": 3, "batch_size": 128}
    recipe = expected(get_recipe("cmsf-semi-small").changed(offline), images, 28)
    more = clean_views_of(recipe, images, labelled=10)
    assert more is not None
    assert (more.forward_passes, more.backward_passes) == (10 * times, 0)
    assert more.per_pass == compute_of(recipe, images).per_pass
    assert clean_views_of(replace(recipe, pseudo_cache="online"), images, 10) is None
    assert clean_views_of(expected(get_recipe("msf-small"), 640, 28), 640, 10) is None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    folder = tmp_path_factory.mktemp("compute")
    data = write_npz(folder / "bars.npz", per_class=20)
    offline = {"pseudo_cache": "offline", "label_share": 0.25}
    return cmsf.train("cmsf-semi-small", data, folder / "run", quiet=True, **TINY, **offline)


@pytest.fixture
def copied(run: cmsf.Run, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(run.path, tmp_path / "copied")))


def test_a_run_has_cost_what_its_recipe_does_and_its_log_says_how_long(run: cmsf.Run) -> None:
    found = run_cost(run.path)
    assert found.images == 72
    assert found.epochs == 3
    assert found.compute == compute_of(run.recipe, 72)
    assert found.compute.iterations == 6
    lines = metrics(run, "epoch")
    assert found.seconds == pytest.approx(sum(64 / line["images_per_second"] for line in lines))
    assert found.reached["20-nn"] == Reached(lines[-1]["20-nn"], found.epochs)
    labelled = len(run.data().train.labelled)
    assert found.clean_views is not None
    assert found.clean_views.passes == labelled * 5
    assert not found.on_imagenet


def rewrite_lines(folder: RunFolder, **changes: Any) -> None:
    lines = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    folder.metrics_file.write_text("".join(json.dumps(line | changes) + "\n" for line in lines))


def test_an_unfinished_run_has_cost_its_whole_epochs_and_a_torn_line_is_none(copied: RunFolder) -> None:
    lines = copied.metrics_file.read_text().splitlines(keepends=True)
    last = next(number for number, line in enumerate(lines) if json.loads(line)["step"] == 4 and '"epoch", ' in line)
    copied.metrics_file.write_text("".join(lines[: last + 1]) + lines[-1][:-1])
    found = run_cost(copied)
    assert found.epochs == 2
    assert found.compute == compute_of(copied.recipe(), 72, epochs=2)
    assert found.clean_views is not None
    assert found.clean_views.iterations == 3
    copied.metrics_file.write_text("")
    assert run_cost(copied).compute.flops == 0


def test_an_accuracy_stands_at_what_was_spent_until_it_was_measured(
    copied: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in copied.metrics_file.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "epoch" and line["step"] != 2:
            line.pop("20-nn", None)
        elif line["kind"] == "epoch":
            line["20-nn"] = 62.5
    copied.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run_cost(copied)
    assert found.reached["20-nn"] == Reached(62.5, 1)
    (point,) = accuracy_points({"a": found})["20-NN"]
    assert (point.flops, point.accuracy) == (compute_of(copied.recipe(), 72, epochs=1).flops, 62.5)
    said = " ".join(" ".join(lines_of(capsys, copied.path)).split())
    assert "its 20-NN is of epoch 1, after" in said


def test_the_list_of_images_is_read_once_and_again_when_it_has_changed(
    copied: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    listing = RunFolder.listing
    monkeypatch.setattr(RunFolder, "listing", lambda folder: read.append(folder.path) or listing(folder))
    before = run_cost(copied)
    assert run_cost(copied) == before
    assert len(read) == 1
    table = pq.read_table(copied.data_file)
    pq.write_table(table.filter(pc.not_equal(table["split"], "test")), copied.data_file)
    after = run_cost(copied)
    assert len(read) == 2
    assert after.images == before.images
    assert after.tested_on != before.tested_on


@pytest.mark.parametrize("rate", [0.0, None, "fast", -1, 10**400, True])
def test_without_a_rate_of_every_epoch_nobody_knows_how_long_it_took(rate: Any, copied: RunFolder) -> None:
    rewrite_lines(copied, images_per_second=rate)
    assert run_cost(copied).seconds is None


@pytest.mark.parametrize("step", [0, 3, 2.0, "2", None, 2**70, 8, [2]])
def test_epochs_that_the_run_cannot_have_are_refused(step: Any, copied: RunFolder) -> None:
    rewrite_lines(copied, step=step)
    with pytest.raises(BadInput, match="has epochs that are not those of its recipe and images"):
        run_cost(copied)


@pytest.mark.parametrize("line", ['{"kind": "epoch", \n', '{"kind": "epoch", ' + "x" * (1 << 20)])
def test_a_log_that_is_none_is_refused(line: str, copied: RunFolder) -> None:
    copied.metrics_file.write_text(line)
    with pytest.raises(BadInput, match="it is not what cmsf train wrote"):
        run_cost(copied)
    copied.metrics_file.unlink()
    with pytest.raises(BadInput, match=r"has no metrics\.jsonl"):
        run_cost(copied)


def test_linear_accuracy_is_that_of_the_runs_results(copied: RunFolder) -> None:
    copied.results.mkdir(exist_ok=True)
    (copied.results / "linear.json").write_text('{"figures": {"linear top-1": 81.5, "linear top-5": 99}}')
    (copied.results / "linear-sgd.json").write_text('["no figures"]')
    assert run_cost(copied).reached["linear top-1"].per_cent == 81.5
    assert "SGD top-1" not in run_cost(copied).reached


@pytest.mark.parametrize(("classes", "test", "comparable"), [(1000, 500, True), (1000, 90, False), (9, 500, False)])
def test_only_imagenet_is_compared_with_what_is_published(
    classes: int, test: int, comparable: bool, copied: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundredth of it; a few images may be missing."""
    monkeypatch.setattr("cmsf.runs.cost.IMAGENET_IMAGES", 12_811)
    monkeypatch.setattr("cmsf.runs.cost.IMAGENET_TEST_IMAGES", 500)
    split = ["train"] * 12_800 + ["test"] * test
    truth = [str(number % classes) for number in range(len(split))]
    listing = Listing(pa.table({"split": split, "label": truth, "truth": truth, "path": truth}))
    monkeypatch.setattr(RunFolder, "listing", lambda _: listing)
    copied.metrics_file.write_text("")
    assert run_cost(copied).on_imagenet is comparable


# The command


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[str]:
    assert main(["flops", *map(str, arguments)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    return lines


def test_the_papers_table_is_printed_and_points_to_the_errata(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys)
    row = next(line for line in lines if line.startswith("PAWS (sup=6720)"))
    assert " ".join(row.split()[2:]) == "3.1 3.1 4096 1 1 6720 38835 312 300 36.35 21.26 75.5"
    assert "BYOL 4 2 4096 24576 312 1000 76.68 39.87 68.8" in [" ".join(line.split()) for line in lines]
    assert sum("docs/results/errata.md" in line for line in lines) == 1


def test_the_papers_table_does_not_wait_for_torch() -> None:
    script = "import sys; from cmsf.cli import main; main(['flops']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_recipes_and_runs_have_a_row_each(run: cmsf.Run, capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(capsys, run.path, "cmsf-self-imagenet", "paws-small")
    header, mine, *others = lines
    assert header.split() == ["epochs", "fwd", "bwd", "batch", "steps", "passes", "FLOPs", "time", "20-NN"]
    assert mine.split()[-10:-5] == ["3", "2", "1", "32", "6"]
    assert others[0].split()[1:5] == ["200", "2", "1", "256"]
    assert any("small-residual at 28 px: 1.32e7 multiply-adds" in line for line in lines)
    assert any("resnet50 at 224 px: 4.09e9 multiply-adds" in line for line in lines)
    assert "offline cache of pseudo-labels adds 5 forward passes of" in " ".join(line.strip() for line in lines)


def test_a_name_too_long_for_the_table_gives_way_to_the_figures(
    copied: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    far = copied.path.parent / ("x" * 150) / "\x1b[2J"
    far.parent.mkdir()
    copied.path.rename(far)
    lines = lines_of(capsys, far)
    assert "…" in lines[1]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("name", ["runs.png", "runs.SVG"])
def test_a_picture_of_runs_is_drawn(
    name: str, copied: RunFolder, run: cmsf.Run, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copied.path.parent / name
    assert "picture" in lines_of(capsys, copied.path, run.path, "--out", out)[-1]
    start = out.read_bytes()[:8]
    assert start == (b"\x89PNG\r\n\x1a\n" if name.endswith("png") else b"<?xml ve")
    assert [file.name for file in out.parent.iterdir() if file.is_file()] == [name]


def test_the_papers_figure_is_the_same_file_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one.svg", "two.svg"):
        lines_of(capsys, "--published", "--out", tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_points_of_the_papers_figure_are_its_rows() -> None:
    left = published_points("linear", epochs=200)
    assert len(left) == 14
    assert {(point.name, point.accuracy) for point in left} >= {("CMSF self (128K)", 73.0), ("MoCo v2, sym.", 69.9)}
    with_knn = {point.name for point in published_points("20-nn")}
    assert "MoCo v2, 800 ep." in with_knn
    assert not any(name.startswith("SimCLR") for name in with_knn)


def test_names_in_a_picture_cover_neither_each_other_nor_a_point() -> None:
    points = [Point(f"runs/method-{n}", 4e13 * (1 + n % 3), 80 + n / 4) for n in range(18)]
    figure = draw_runs({"20-NN": points}, {})
    axes = figure.axes[0]
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
    assert len(boxes) == 18
    overlapping = [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)]
    assert not overlapping


def test_names_in_the_papers_figure_cover_neither_each_other_nor_a_point_nor_another_panel() -> None:
    figure = compute_figure.draw_published()
    FigureCanvasAgg(figure).draw()
    left, right = figure.axes
    for axes in (left, right):
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not [(a, b) for a, b in combinations(boxes, 2) if a.overlaps(b)]
        centers = [axes.transData.transform(points.get_offsets()[0]) for points in axes.collections]
        assert not [box for box in boxes if any(box.contains(*center) for center in centers)]
        assert all(box.x0 >= axes.bbox.x0 for box in boxes)
    assert all(text.get_window_extent().x1 < right.bbox.x0 for text in left.texts)


@pytest.mark.parametrize(
    "flops",
    [
        (4e12, 6.2e12),
        (4e12, 4.1e12),
        (6.46e13, 6.47e13),
        (6.46e13, 6.4601e13),
        (9e11, 2e12),
        (2.2e11, 8e11),
        (1.1e12, 7.9e12),
        (9e11, 5e13),
        (1e12, 1e15),
        (1e13, 1e18),
        (1e10, 1e19),
        (3e9, 3e9),
    ],
)
def test_compute_has_ticks_that_are_right_told_apart_and_do_not_touch(flops: tuple[float, float]) -> None:
    figure = draw_runs({"20-NN": [Point(f"run {n}", each, 80 + n) for n, each in enumerate(flops)]}, {})
    canvas, axes = FigureCanvasAgg(figure), figure.axes[0]
    canvas.draw()
    (low, high), places = axes.get_xlim(), axes.get_xticks().tolist()
    written = axes.get_xticklabels()
    assert len(places) >= 2
    assert all(low <= place <= high for place in places)
    for place, label in zip(places, written, strict=True):
        assert float(label.get_text()) == pytest.approx(place, rel=(high - low) / high / 50)
    boxes = [label.get_window_extent(canvas.get_renderer()) for label in written]
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


@pytest.mark.parametrize(("low", "high"), [(1.2e10, 9.9e10), (1.2e12, 9.9e12), (1e10, 9.9e10), (4.1e11, 4.9e11)])
def test_ticks_in_steps_of_two_and_a_half_are_written_in_full(low: float, high: float) -> None:
    """2.5e10 was written as 2e10, and 7.5e10 as 8e10."""
    for text, place in compute_figure._ticks(low, high).items():
        assert float(text) == pytest.approx(place, rel=1e-9)
    if low == 1.2e10:
        assert list(compute_figure._ticks(low, high)) == ["2.5e10", "5.0e10", "7.5e10"]


@pytest.mark.parametrize("letters", [20, 80])
def test_names_stay_inside_of_the_picture(letters: int) -> None:
    points = [Point(f"{n} {'abcdefghij' * 8}"[:letters], 4e13, 80 + n) for n in range(5)]
    for beside in ({}, {"20-NN": published_points("20-nn")}):
        figure = draw_runs({"20-NN": points}, beside)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        boxes = [text.get_window_extent(canvas.get_renderer()) for text in figure.axes[0].texts[:5]]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)


def test_a_run_without_accuracy_is_not_drawn(copied: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    copied.metrics_file.write_text("")
    out = copied.path.parent / "x.png"
    assert main(["flops", str(copied.path), "--out", str(out)]) == 2
    assert "no run has an accuracy to draw" in capsys.readouterr().err
    assert not out.exists()


def test_a_recipe_that_leaves_its_size_to_the_images_is_counted_with_a_number_in_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("backbone: small-residual\n")
    assert main(["flops", str(file), "--images", "1000"]) == 2
    assert "leaves its size to the images" in capsys.readouterr().err
    file.write_text("backbone: small-residual\nsize: 32\n")
    assert any("small-residual at 32 px" in line for line in lines_of(capsys, file, "--images", 1000))
