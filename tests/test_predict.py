"""Predictions: a row an image, whatever is the matter with some; and the figure that the classifier was judged by."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from helpers import noise_split, write_npz, write_photos
from PIL import Image
from runs import TINY
from test_cli import refusal

import cmsf
from cmsf.cli import main
from cmsf.data import Unreadable, load_batches, open_source
from cmsf.data.sources.table import read_label_list
from cmsf.data.transforms import CenterCrop
from cmsf.evaluation import FeatureExtractor
from cmsf.evaluation.predict import predict
from cmsf.runs import classifier as runs_classifier

NAMES = ["a,b.png", 'quo"te.png', "new\nline.png", "größe 写真.png"]
BROKEN = ["broken.jpg", "empty.png", "text.png"]
KINDS = ["grey.png", "palette.png", "sixteen.png"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of many sizes, larger than what memory keeps, in splits."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 10), ("test", 6)):
        write_photos(root / split, count, 3, side=60)
    return root


@pytest.fixture(scope="module")
def classifier(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> cmsf.Classifier:
    place = tmp_path_factory.mktemp("runs")
    small = {"size": 16, "backbone": "small-residual", "epochs": 1, "batch_size": 16}
    run = cmsf.train("cmsf-self-small", photos, place / "a", quiet=True, **TINY | small)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_neighbours", "draw_confusion", "draw_reliability"):
            patch.setattr(runs_classifier, name, lambda *_, **__: None)
        return cmsf.finetune(run.path, tune="whole", epochs=4, lr=0.05, workers=0, quiet=True)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder never seen: names in any script, odd kinds of images, and three that are none."""
    folder = tmp_path / "odd"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(256, size=(40, 30, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    for name in NAMES:
        picture.save(folder / name)
    picture.convert("L").save(folder / "grey.png")
    picture.convert("P").save(folder / "palette.png")
    Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257).save(folder / "sixteen.png")
    picture.save(folder / "broken.jpg")
    (folder / "broken.jpg").write_bytes((folder / "broken.jpg").read_bytes()[:300])
    (folder / "text.png").write_text("no image at all")
    (folder / "empty.png").touch()
    return folder


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def test_its_accuracy_on_the_test_split_is_the_classifiers_figure(classifier: cmsf.Classifier, photos: Path) -> None:
    found = classifier.predict(photos, workers=0)
    assert [one.path.split("/")[0] for one in found] == ["train"] * 30 + ["test"] * 18
    right = [one.label == one.path.split("/")[1] for one in found if one.path.startswith("test")]
    assert 100 * sum(right) / len(right) == classifier.result("classifier")["figures"]["classifier"]


def test_an_image_has_the_same_scores_from_memory_and_from_the_disk(
    classifier: cmsf.Classifier, photos: Path, tmp_path: Path
) -> None:
    kept = classifier.data().test
    assert kept is not None
    like = FeatureExtractor(classifier.backbone(), classifier.preprocessing)
    from_memory = predict(classifier.network(), kept, like, classifier.classes)
    from_disk = classifier.predict(photos, workers=0)[30:]
    assert from_memory == from_disk
    shutil.copy(photos / from_disk[4].path, tmp_path / "one.jpg")
    (alone,) = classifier.predict(tmp_path, workers=0)
    assert alone.labels == from_disk[4].labels
    assert alone.confidences == pytest.approx(from_disk[4].confidences, abs=1e-5)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_cannot_be_read_is_a_row_and_never_a_stop(
    classifier: cmsf.Classifier, odd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    out = tmp_path / "p.csv"
    arguments = ["predict", classifier.path, "--data", odd, "--out", out, "--workers", workers, "--threads", "1"]
    assert main([*map(str, arguments)]) == 0
    said = capsys.readouterr().out
    assert "10 images" in said
    assert "3 cannot be read (the first is broken.jpg" in said
    assert str(out) in said
    found = {row["path"]: row for row in rows(out)}
    assert list(found) == sorted([*NAMES, *BROKEN, *KINDS])
    header = ["path", "label", "confidence", "label_2", "confidence_2", "label_3", "confidence_3", "error"]
    assert all(list(row) == header for row in found.values())
    for name in BROKEN:
        assert found[name].pop("error")
        assert set(found[name].values()) == {name, ""}
    for name in (*NAMES, *KINDS):
        row = found[name]
        assert row["error"] == ""
        assert {row["label"], row["label_2"], row["label_3"]} == set(classifier.classes)
        sure = [float(row[column]) for column in header if column.startswith("confidence")]
        assert sure == sorted(sure, reverse=True)
        assert sum(sure) == pytest.approx(1, abs=3e-6)
        assert all(len(row[column].split(".")[1]) == 6 for column in header if column.startswith("confidence"))


def test_predictions_serve_as_a_list_of_labels(classifier: cmsf.Classifier, odd: Path, tmp_path: Path) -> None:
    out, parquet = tmp_path / "p.csv", tmp_path / "p.parquet"
    found = classifier.predict(odd, out, workers=0)
    assert classifier.predict(odd, parquet, workers=0) == found
    source = open_source(odd)
    paths = source.train.images.paths
    expected = {"train": [one.label for one in found]}
    assert read_label_list(source, out) == expected
    assert read_label_list(source, parquet) == expected
    table = pq.read_table(parquet).to_pydict()
    assert table["confidence"] == [one.confidence for one in found]
    assert table["path"] == list(paths)


def test_arrays_and_lists_of_files_are_sources_too(classifier: cmsf.Classifier, photos: Path, tmp_path: Path) -> None:
    assert len(classifier.predict(write_npz(tmp_path / "x.npz", per_class=3), workers=0)) == 12
    listed = tmp_path / "list.csv"
    listed.write_text(f"path\n{next(photos.rglob('*.jpg'))}\nnowhere.jpg\n")
    there, missing = classifier.predict(listed, workers=0)
    assert there.label in classifier.classes
    assert (missing.label, missing.error) == (None, "no such file")


def test_what_cannot_be_predicted_or_written_is_refused(
    classifier: cmsf.Classifier, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = classifier.path.with_name("a")
    assert f"{run} is not a classifier; make one: cmsf finetune {run}" in refusal(
        capsys, "predict", run, "--data", photos
    )
    assert "no such run" in refusal(capsys, "predict", tmp_path / "nowhere", "--data", photos)
    for out, message in (
        (tmp_path, "expected a .csv or .parquet or .pq file"),
        (tmp_path / "no" / "p.csv", "expected a file in an existing folder"),
        (tmp_path / "p.txt", "expected a .csv or .parquet or .pq file"),
    ):
        assert message in refusal(capsys, "predict", classifier.path, "--data", photos, "--out", out)
    assert "required: --data" in refusal(capsys, "predict", classifier.path)
    assert not list(tmp_path.iterdir())


def test_a_damaged_classifier_is_named(classifier: cmsf.Classifier, photos: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(classifier.path, tmp_path / "c")
    (copy / "head.safetensors").write_bytes(b"nothing")
    with pytest.raises(cmsf.BadInput, match=r"cannot read .*head\.safetensors"):
        cmsf.Classifier(copy).predict(photos, workers=0)
    (copy / "classifier.json").write_text('{"classes": 3}')
    with pytest.raises(cmsf.BadInput, match="is not what cmsf wrote"):
        cmsf.Classifier(copy)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_tolerant_feed_leaves_out_what_is_broken_and_passes_over_what_is_empty(odd: Path, workers: int) -> None:
    part = open_source(odd).train
    split = noise_split(len(part), 0)
    split = type(split)(part.images, part.images.paths, split.truth, split.label)
    broken = [part.images.paths.index(name) for name in BROKEN]
    good = [i for i in range(len(split)) if i not in broken]
    plan = [(0, torch.tensor(broken)), (0, torch.tensor([good[0], broken[0], good[1]]))]
    told: list[tuple[int, str]] = []

    def leave(i: int, error: Unreadable) -> None:
        told.append((i, error.path))

    crops = {0: CenterCrop(8)}
    batches = list(load_batches(split, plan, crops, seed=0, device="cpu", workers=workers, on_unreadable=leave))
    assert [batch.index.tolist() for batch in batches] == [good[:2]]
    assert batches[0].crop(crops[0], 0).shape == (2, 3, 8, 8)
    assert told == [(i, split.paths[i]) for i in [*broken, broken[0]]]
    with pytest.raises(Unreadable):
        list(load_batches(split, plan, crops, seed=0, device="cpu", workers=workers))
