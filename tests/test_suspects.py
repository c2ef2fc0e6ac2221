"""Labels that neighbours doubt: equal to a slow count, found where they were put, and safe to be read back."""

import csv
import shlex
from dataclasses import replace
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import images_of_classes, noise, unit, write_npz
from PIL import Image
from runs import TINY
from test_cli import refusal
from torch import Tensor

import cmsf
from cmsf.analysis import label_issues as module
from cmsf.analysis.figures.label_issues import draw_suspects
from cmsf.analysis.label_issues import (
    KNN,
    THRESHOLD,
    LabelScores,
    Suspect,
    compare_with_truth,
    find_label_issues,
    most_confused,
    score_labels,
)
from cmsf.cli import main
from cmsf.data import Dataset, Split, open_source
from cmsf.data.labels import Labels, add_noise
from cmsf.data.prepare import load_dataset
from cmsf.data.sources.table import read_label_list
from cmsf.evaluation.knn import KNNClassifier
from cmsf.recipes.recipe import Recipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput

pytestmark = pytest.mark.usefixtures("one_thread")
HOSTILE = ("a,b", "new\nline", "=1+1", "<script>")


# Scores


def slow(features: Tensor, label: list[int], k: int, temperature: float) -> list[tuple[float, int, float, float]]:
    """Score, suggestion and both shares, an image, a neighbour and a class at a time."""
    found, n = [], len(label)
    for i in range(n):
        others = [j for j in range(n) if j != i]
        near = sorted(others, key=lambda j: (-float(features[i] @ features[j]), j))[:k]
        weight = {j: exp(float(features[i] @ features[j]) / temperature) for j in near}
        share, support = {}, {}
        for c in range(max(label) + 1):
            share[c] = sum(weight[j] for j in near if label[j] == c) / sum(weight.values())
            support[c] = share[c] + 0.1 * sum(label[j] == c for j in others) / len(others)
        best = min((c for c in support if c != label[i]), key=lambda c: (-support[c], c))
        alone = label.count(label[i]) == 1
        score = 0.0 if alone else support[best] / (support[best] + support[label[i]])
        found.append((score, best, share[label[i]], share[best]))
    return found


def as_rows(found: LabelScores) -> list[tuple[float, int, float, float]]:
    columns = (found.score, found.suggested, found.label_share, found.suggested_share)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def labels_of(count: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("count", "classes", "k"), [(60, 4, 7), (40, 2, 1), (30, 12, 100), (3, 3, 5)])
def test_verdicts_equal_a_slow_count(count: int, classes: int, k: int) -> None:
    features, label = unit(count, 5, 0), labels_of(count, classes)
    found = score_labels(features, label, KNNClassifier(k, 0.07))
    for row, expected in zip(as_rows(found), slow(features, label.tolist(), k, 0.07), strict=True):
        assert row == pytest.approx(expected, abs=1e-12)


def test_it_does_not_matter_how_many_images_are_looked_at_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    features, label = unit(50, 5, 1).float(), labels_of(50, 3)
    whole = score_labels(features, label)
    monkeypatch.setattr(module, "_CHUNK", 7)
    parts = score_labels(features, label)
    for name in vars(whole):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))


def test_an_image_is_never_its_own_neighbour_and_its_duplicate_is_the_first() -> None:
    features, label = unit(40, 5, 2).float(), labels_of(40, 3)
    features[31], features[5] = features[7], features[7]
    near = score_labels(features, label, KNNClassifier(5, 0.07)).near
    assert not (near == torch.arange(40)[:, None]).any()
    assert near[7, :2].tolist() == [5, 31]
    assert near[5, :2].tolist() == [7, 31]
    assert near[31, :2].tolist() == [5, 7]


def test_duplicates_with_different_labels_make_each_other_suspect() -> None:
    features = torch.cat([unit(20, 8, 3), unit(1, 8, 4).expand(6, -1)])
    label = torch.tensor([0, 1] * 10 + [0, 0, 0, 0, 0, 1])
    score = score_labels(features, label, KNNClassifier(5, 0.07)).score
    assert int(score.argmax()) == 25
    assert score[25] > THRESHOLD


def test_equal_votes_suggest_the_lower_class_and_equal_scores_keep_the_order_of_images() -> None:
    features = torch.tensor([[1.0, 0.0]] * 6)
    label = torch.tensor([2, 2, 1, 1, 0, 0])
    found = score_labels(features, label, KNNClassifier(5, 0.07))
    assert found.suggested.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.near[:, 0].tolist() == [1, 0, 0, 0, 0, 0]
    data = labelled(label)
    rows = find_label_issues(lambda split: features[: len(split)], data, min_score=0)
    assert [one.index for one in rows] == sorted(range(6), key=lambda i: (-float(found.score[i]), i))


def test_an_image_alone_in_its_class_is_no_suspect_for_nobody_could_vote_for_it() -> None:
    features, label = unit(30, 4, 5), torch.tensor([0] * 14 + [1] * 15 + [2])
    found = score_labels(features, label)
    assert found.score[29] == 0
    assert found.label_share[29] == 0
    assert (found.score[:29] > 0).all()


def test_scores_are_in_zero_to_one_and_above_a_half_where_another_class_has_more_support() -> None:
    features, label = unit(200, 6, 6), labels_of(200, 5)
    found = score_labels(features, label)
    assert ((found.score >= 0) & (found.score <= 1)).all()
    clear = (found.suggested_share - found.label_share).abs() > 0.1  # what class sizes may add to a share
    assert torch.equal(found.score[clear] > 0.5, (found.suggested_share > found.label_share)[clear])


def clusters(per_class: int, classes: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    truth = torch.arange(classes).repeat_interleave(per_class)
    centre = unit(classes, 32, seed)[truth]
    features = centre + spread * unit(len(truth), 32, seed + 1)
    return (features / features.norm(dim=1, keepdim=True)).float(), truth


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3])
def test_wrong_labels_of_easy_images_are_found_and_right_ones_left(rate: float) -> None:
    features, truth = clusters(150, 6, spread=0.8)
    label = add_noise(Labels(truth, tuple("abcdef")), rate, seed=3).number
    wrong, score = label != truth, score_labels(features, label).score
    assert score[wrong].min() > score[~wrong].max()
    found = score_labels(features, label)
    assert torch.equal(found.suggested[wrong], truth[wrong])
    if rate <= 0.1:  # with more of them, wrong labels are voted for too
        assert torch.equal(found.score >= THRESHOLD, wrong)


# Suspects of a data set


def labelled(label: Tensor, truth: Tensor | None = None) -> Dataset:
    names = tuple("abcdefgh")[: int(label.max()) + 1]
    pixels = torch.zeros(len(label), 3, 8, 8, dtype=torch.uint8)
    split = Split(pixels, [f"{i}.png" for i in range(len(label))], label if truth is None else truth, label)
    return Dataset("some", names, names, split, None, "none")


def test_unlabelled_images_neither_vote_nor_are_judged_and_rows_are_those_of_the_training_images() -> None:
    features, label = unit(40, 5, 7), labels_of(40, 3)
    label[::3] = UNKNOWN
    known = (label != UNKNOWN).nonzero()[:, 0]
    data = labelled(label)
    rows = find_label_issues(
        lambda split: features[[int(path.split(".")[0]) for path in split.paths]], data, min_score=0
    )
    assert sorted(one.index for one in rows) == known.tolist()
    assert all(one.path == f"{one.index}.png" for one in rows)
    alone = score_labels(features[known], label[known])
    for one in rows:
        place = int((known == one.index).nonzero())
        assert one.near == tuple(known[alone.near[place]].tolist())
        assert one.score == float(alone.score[place])
        assert one.label == data.label_names[int(label[one.index])]


def test_the_truth_is_told_and_changes_no_score() -> None:
    features, label = unit(40, 5, 8), labels_of(40, 3)
    one = find_label_issues(lambda split: features, labelled(label), min_score=0)
    other = find_label_issues(lambda split: features, labelled(label, labels_of(40, 3, seed=9)), min_score=0)
    assert [replace(row, truth=None) for row in one] == [replace(row, truth=None) for row in other]
    assert [row.truth for row in one] != [row.truth for row in other]


def test_a_higher_threshold_calls_the_first_of_the_same_rows() -> None:
    features, data = unit(60, 4, 10), labelled(labels_of(60, 3))
    every = find_label_issues(lambda split: features, data, min_score=0)
    assert [one.score for one in every] == sorted((one.score for one in every), reverse=True)
    for least in (0.4, 0.7, every[5].score):
        some = find_label_issues(lambda split: features, data, least)
        assert some == [one for one in every if one.score >= least]
    assert find_label_issues(lambda split: features, data) == [one for one in every if one.score >= THRESHOLD]


def test_precision_and_recall_are_counted_and_pairs_in_order() -> None:
    def one(label: str, suggested: str, score: float, truth: str | None) -> Suspect:
        return Suspect("x", 0, label, suggested, score, 0.1, 0.9, (), truth)

    every = [one("a", "b", 0.99, "b"), one("c", "b", 0.95, None), one("a", "b", 0.92, "a"), one("b", "c", 0.3, "a")]
    hits = compare_with_truth(every, THRESHOLD)
    assert hits is not None
    assert (hits.called, hits.wrong, hits.both) == (2, 2, 1)
    assert (hits.precision, hits.recall) == (0.5, 0.5)
    assert (
        compare_with_truth(every[1:3], THRESHOLD) is None
    )  # nothing is wrong by the truth, as where it is the labels' own
    assert most_confused(every) == [("a", "b", 2), ("c", "b", 1), ("b", "c", 1)]


def test_labels_that_cannot_be_doubted_are_refused() -> None:
    data = noise(12, 0)
    nothing = replace(data, train=replace(data.train, label=torch.full((12,), UNKNOWN)))
    with pytest.raises(BadInput, match="no labels to check; give a list with --labels"):
        find_label_issues(lambda split: unit(len(split), 4, 0), nothing)
    same = replace(data, train=replace(data.train, label=torch.zeros(12, dtype=torch.int64)))
    with pytest.raises(BadInput, match="all 12 labelled images of noise are 'a'; at least two classes"):
        find_label_issues(lambda split: unit(len(split), 4, 0), same)


@pytest.mark.parametrize("count", [1, 9, 50])
def test_a_sheet_is_drawn_of_names_of_any_kind(count: int, tmp_path: Path) -> None:
    split = noise(60, 0).train
    rows = [Suspect("x", i, "$x_{" + "long" * 9, HOSTILE[i % 4], 0.9, 0.1, 0.9, ()) for i in range(count)]
    draw_suspects(split, rows, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        image.load()
        assert image.format == "PNG"


# The command


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose classes have names that other programs might take for something else."""
    root = tmp_path_factory.mktemp("photos") / "photos"
    images, label = images_of_classes(14, len(HOSTILE), 16)
    for i, (pixels, number) in enumerate(zip(images, label, strict=True)):
        place = root / HOSTILE[number]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{i:02d}, {HOSTILE[i % 4]}.png")
    return root


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    place = tmp_path_factory.mktemp("runs") / "noisy"
    small = {"epochs": 1, "batch_size": 16, "label_noise": 0.2, "seed": 1}
    return cmsf.train("cmsf-self-small", photos, place, quiet=True, **TINY | small)


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream, strict=True))


def suspects(*arguments: str | Path) -> int:
    return main(["suspects", *map(str, arguments), "--threads", "1", "--workers", "0"])


def test_the_list_holds_the_suspects_of_the_labels_that_training_used(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.csv"
    assert suspects(run.path, "--out", out, "--least", "0.55") == 0
    said = capsys.readouterr().out
    expected = run.suspects(least=0.55, workers=0)
    assert len(expected) > 5
    rows = rows_of(out)
    assert list(rows[0]) == ["path", "index", "label", "suggested", "score", "label_share", "suggested_share"]
    assert [(row["path"], int(row["index"]), row["label"], row["suggested"]) for row in rows] == [
        (one.path, one.index, one.label, one.suggested) for one in expected
    ]
    assert [float(row["score"]) for row in rows] == pytest.approx([one.score for one in expected], abs=1e-6)
    trained = {row["path"]: row for row in run.folder.listing().rows() if row["split"] == "train"}
    assert all(trained[row["path"]]["label"] == row["label"] for row in rows)
    assert all(trained[row["path"]]["index"] == int(row["index"]) for row in rows)
    assert f"{len(rows)} of {len(trained)} labels are suspect" in said
    wrong = sum(row["label"] != row["truth"] for row in trained.values())
    both = sum(trained[row["path"]]["truth"] != row["label"] for row in rows)
    assert wrong > 3
    assert f"{wrong} labels are wrong: precision {100 * both / len(rows):.1f} %" in said
    assert f"recall {100 * both / wrong:.1f} %" in said
    assert str(out) in said
    assert str(out.with_suffix(".png")) in said
    with Image.open(out.with_suffix(".png")) as image:
        image.load()


def test_names_from_data_stay_data_in_the_list_and_in_a_line_on_the_screen(
    run: cmsf.Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.csv"
    assert suspects(run.path, "--out", out, "--least", "0") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(
        line.startswith(("  ", "suspects", "open", "most often:", "by the truth", "correct", "4", "5"))
        for line in lines
    )
    rows = rows_of(out)
    trained = [row["path"] for row in run.folder.listing().rows() if row["split"] == "train"]
    assert sorted(row["path"] for row in rows) == sorted(trained)
    assert {row["label"] for row in rows} == set(HOSTILE)
    assert {row["suggested"] for row in rows} <= set(HOSTILE)
    source = open_source(photos)
    assert [name for name in read_label_list(source, out)["train"] if name is not None]


def test_a_corrected_list_corrects_the_labels_and_leaves_the_others(
    run: cmsf.Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, corrected = tmp_path / "found.csv", tmp_path / "corrected.csv"
    assert suspects(run.path, "--out", out, "--least", "0.5") == 0
    rows = rows_of(out)
    expected = dict(zip(open_source(photos).train.images.paths, open_source(photos).train.names, strict=True))
    for place, row in enumerate(rows):
        row["label"] = ("", "a new class", row["suggested"])[place % 3]
        expected[row["path"]] = row["label"] or None
    with out.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    *_, last = capsys.readouterr().out.splitlines()
    command = shlex.split(last.partition("make a list of it: ")[2])
    assert command == ["cmsf", "labels", str(photos), "--corrections", str(out), "--out", "labels.csv"]
    assert main([*command[1:-1], str(corrected)]) == 0
    changed = sum(
        name != expected[path]
        for path, name in zip(open_source(photos).train.images.paths, open_source(photos).train.names, strict=True)
    )
    said = capsys.readouterr().out
    assert f"{changed} labels corrected, of {len(rows)} listed" in said
    assert "classes that were not there before: 'a new class'" in said
    source = open_source(photos)
    given = dict(zip(source.train.images.paths, read_label_list(source, corrected)["train"], strict=True))
    assert given == expected


def test_without_a_truth_of_their_own_nothing_is_said_of_precision_and_no_suspects_are_no_picture(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = write_npz(tmp_path / "clean.npz", per_class=10)
    out = tmp_path / "found.csv"
    assert suspects(run.path, "--data", clean, "--out", out, "--least", "1") == 0
    said = capsys.readouterr().out
    assert "0 of 36 labels are suspect" in said
    assert "precision" not in said
    assert out.read_text() == "path,index,label,suggested,score,label_share,suggested_share\n"
    assert not out.with_suffix(".png").exists()


def test_a_label_that_one_image_alone_has_is_said_to_be_beyond_judging(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, labels = write_npz(tmp_path / "bars.npz", per_class=10), tmp_path / "labels.csv"
    trained_on = load_dataset(open_source(data), Recipe(), 16).train.paths
    names = ["unique", *["a", "b"] * 18][: len(trained_on)]
    labels.write_text(
        "path,label\n" + "".join(f"{path},{name}\n" for path, name in zip(trained_on, names, strict=True))
    )
    out = tmp_path / "found.csv"
    assert suspects(run.path, "--data", data, "--labels", labels, "--out", out) == 0
    assert "1 cannot be scored: no other image has their label" in capsys.readouterr().out
    assert "unique" not in {row["label"] for row in rows_of(out)}


def test_a_list_of_other_labels_is_checked_against_the_sources_own(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, labels = write_npz(tmp_path / "bars.npz", per_class=20), tmp_path / "labels.csv"
    assert main(["labels", str(data), "--noise", "0.2", "--out", str(labels)]) == 0
    out = tmp_path / "found.csv"
    assert suspects(run.path, "--data", data, "--labels", labels, "--out", out, "--least", "0.6") == 0
    assert "by the truth" in capsys.readouterr().out
    source = open_source(data)
    given = dict(zip(source.train.images.paths, read_label_list(source, labels)["train"], strict=True))
    assert all(given[row["path"]] == row["label"] for row in rows_of(out))


def test_what_cannot_be_checked_is_refused_in_a_line_and_nothing_is_written(
    run: cmsf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unlabelled = write_npz(tmp_path / "unlabelled.npz", labelled=False, per_class=5)
    one_class = write_npz(tmp_path / "one.npz", classes=1, per_class=12)
    np.savez(tmp_path / "none.npz", y=np.zeros(3))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)

    def refused(*arguments: str | Path) -> str:
        return refusal(capsys, "suspects", *arguments)

    assert "no such run: nowhere" in refused("nowhere")
    assert "is not a run" in refused(tmp_path)
    assert "have no labels to check" in refused(run.path, "--data", unlabelled, "--workers", "0")
    assert "at least two classes" in refused(run.path, "--data", one_class, "--workers", "0")
    for least in ("2", "-0.1", "nan", "much"):
        assert f"invalid value --least {least}; expected a number from 0 to 1" in refused(run.path, f"--least={least}")
    assert "expected a .csv file" in refused(run.path, "--out", "suspects.txt")
    assert "expected a file in an existing folder" in refused(run.path, "--out", "nowhere/suspects.csv")
    assert "arguments are required: RUN" in refused()
    assert "cannot read" in refused(run.path, "--labels", "nowhere.csv")
    assert not list(place.iterdir())


def test_the_help_says_the_default_and_how_the_list_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["suspects", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert f"(default: {THRESHOLD})" in words
    assert "cmsf labels SOURCE --corrections suspects.csv" in words
    assert KNN.k == 100  # as docs/results/suspects.md has it
