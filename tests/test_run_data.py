"""A run's own images and others: read once, kept apart in results/, and only as many in memory as fit."""

import csv
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers import write_npz, write_photos
from runs import TINY

import cmsf
from cmsf.cli import main
from cmsf.runs.listing import Listing


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    place = tmp_path_factory.mktemp("run")
    return cmsf.train("msf-small", write_npz(place / "bars.npz"), place / "run", quiet=True, **TINY | {"epochs": 1})


@pytest.mark.parametrize(("first", "second"), [("sets/cars.v1", "sets/cars.v2"), ("a/photos", "b/photos")])
def test_results_of_two_sources_of_one_name_have_a_file_each(
    first: str, second: str, run: cmsf.Run, tmp_path: Path
) -> None:
    files = [run.result_file("knn", tmp_path / source) for source in (first, second)]
    assert len(set(files)) == 2
    assert run.result_file("knn", tmp_path / first) == files[0]
    assert run.result_file("knn").name == "knn.json"
    lists = [run.result_file("few-labels", lists=[tmp_path / source / "few.csv"]) for source in (first, second)]
    assert len(set(lists)) == 2


def test_a_result_under_the_name_it_had_before_is_still_found(run: cmsf.Run, tmp_path: Path) -> None:
    other = write_npz(tmp_path / "other.npz", per_class=10)
    record = run.evaluation("knn", other, device="cpu", workers=0)
    assert run.result("knn", other) == record
    run.result_file("knn", other).rename(run.folder.results / "knn-other.json")
    assert run.result("knn", other) == record
    (tmp_path / "b").mkdir()
    same_name = write_npz(tmp_path / "b" / "other.npz", per_class=10)
    with pytest.raises(FileNotFoundError, match=r"knn-other\.json is of .*other\.npz"):
        run.result("knn", same_name)


def test_evaluation_returns_the_record_and_evaluate_its_figures(run: cmsf.Run) -> None:
    record = run.evaluation("knn", device="cpu", workers=0)
    assert record == run.result("knn")
    assert record["figures"] == run.evaluate("knn", device="cpu", workers=0)


def test_other_images_than_the_runs_are_kept_in_memory_only_where_they_fit(
    run: cmsf.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = write_photos(tmp_path / "photos", 5, 2)
    assert run.recipe.cache == "ram"
    assert run.data(photos).in_memory
    monkeypatch.setattr("cmsf.data.prepare.available_memory", lambda: 10_000)
    assert not run.data(photos).in_memory


def test_transfer_refuses_other_data_with_the_remedy(
    run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(run.path), "--with", "transfer", "--data", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"not from --data {tmp_path}" in error
    assert "--suite" in error


def test_a_list_of_few_labels_is_used_to_its_last_training_image(tmp_path: Path) -> None:
    data, labels = write_npz(tmp_path / "bars.npz", labelled=False), tmp_path / "all.csv"
    with np.load(write_npz(tmp_path / "known.npz")) as known:
        truth = known["y"].tolist()
    rows = [("index", "label"), *((str(i), str(label)) for i, label in enumerate(truth))]
    with labels.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    run = cmsf.train("msf-small", data, tmp_path / "run", labels=labels, quiet=True, **TINY | {"epochs": 1})
    train = run.data().train
    few = tmp_path / "few.csv"
    with few.open("w", newline="") as file:
        listed = [(path, truth[int(path.split("/")[-1])]) for path in train.paths[:20]]
        csv.writer(file).writerows([("path", "label"), *listed])
    assert run._listed_subset(few, None).index.tolist() == list(range(20))


def test_the_listing_is_read_once_and_says_what_data_parquet_does(
    run: cmsf.Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = pq.read_table(run.folder.data_file).to_pylist()
    assert run.folder.listing().rows() == rows
    copy = tmp_path / "data.parquet"
    copy.write_bytes(run.folder.data_file.read_bytes())
    calls: list[Path] = []
    read = pq.read_table
    monkeypatch.setattr(pq, "read_table", lambda file, **named: calls.append(file) or read(file, **named))
    for _ in range(3):
        listing = Listing.read(copy)
    assert len(calls) == 1
    assert listing.column("path", "test") == [row["path"] for row in rows if row["split"] == "test"]
    assert listing.seen().labelled == {row["path"] for row in rows if row["split"] == "train"}
