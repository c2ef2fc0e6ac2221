"""Embeddings: the vectors of the evaluation, in files that others read, by a process that may be killed."""

import json
import os
import shutil
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from forked import Started
from helpers import unit, write_npz, write_photos
from PIL import Image
from runs import TINY
from safetensors.torch import load_file, save_file
from test_cli import refusal

import cmsf
from cmsf.cli import main
from cmsf.data import Split
from cmsf.data.labels import Labels
from cmsf.evaluation import FeatureExtractor, features
from cmsf.evaluation.knn import KNN_CLASSIFIERS, classify
from cmsf.runs import embeddings
from cmsf.runs.embedding_files import Names, write_embeddings
from cmsf.utils.files import file_sha256
from cmsf.utils.locks import hold_lock

PART, BATCH = 32, 16
IMAGES, PARTS = 84, 4
SMALL = TINY | {"size": 16, "backbone": "small-residual", "epochs": 1, "batch_size": 16}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """66 photos of many sizes to train on and 18 to test on: 3 small parts and 1."""
    root = tmp_path_factory.mktemp("photos")
    for split, count in (("train", 22), ("test", 6)):
        write_photos(root / split, count, 3, side=60)
    return root


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> cmsf.Run:
    return cmsf.train("cmsf-self-small", photos, tmp_path_factory.mktemp("runs") / "a", quiet=True, workers=0, **SMALL)


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small_parts(monkeypatch)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images the network sees, batch by batch."""
    seen, unit_features = [], features.unit_features

    def count(backbone: torch.nn.Module, views: torch.Tensor) -> torch.Tensor:
        seen.append(len(views))
        return unit_features(backbone, views)

    monkeypatch.setattr(features, "unit_features", count)
    return seen


def set_small_parts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(embeddings, "PART", PART)
    patch.setattr(features, "BATCH", BATCH)


def arguments(run: cmsf.Run, out: Path, *more: str | Path) -> list[str]:
    return ["embed", *map(str, (run.path, "--out", out, "--workers", "0", "--threads", "1", *more))]


def embed_and_die(given: list[str], parts: int | None) -> int:
    """The command in small parts, killed when so many are there; None: when the file is half written."""
    patch, save, left = pytest.MonkeyPatch(), embeddings._Part.save, parts
    set_small_parts(patch)

    def save_or_die(part: Any, file: Path) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left = None if left is None else left - 1
        save(part, file)

    def write_half(out: Path, blocks: Any, *about: Any) -> None:
        def first() -> Iterator[torch.Tensor]:
            yield next(iter(blocks))
            os.kill(os.getpid(), signal.SIGKILL)

        write_embeddings(out, first(), *about)

    patch.setattr(embeddings._Part, "save", save_or_die)
    patch.setattr(embeddings, "write_embeddings", write_half)
    return main(given)


def killed(given: list[str], parts: int | None) -> None:
    process = Started(embed_and_die, given, parts)
    assert process.wait() == -signal.SIGKILL, process.said()


def interrupt(run: cmsf.Run, source: Path, file: Path, patch: pytest.MonkeyPatch) -> list[Path]:
    """The files of two parts, after which somebody has pressed Ctrl-C."""
    save, folder = embeddings._Part.save, file.with_name(f".{file.name}.parts")

    def save_two(part: Any, place: Path) -> None:
        if len(list(folder.glob("*.safetensors"))) == 2:
            raise KeyboardInterrupt
        save(part, place)

    with patch.context() as inner:
        inner.setattr(embeddings._Part, "save", save_two)
        with pytest.raises(KeyboardInterrupt):
            run.embed(source, file, workers=0)
    return sorted(folder.glob("*.safetensors"))


def read(file: Path) -> tuple[torch.Tensor, list[str], list[str | None], list[str], dict[str, Any]]:
    """Features, paths, labels, splits and metadata of either kind of file."""
    if file.suffix == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            labels = [name or None for name in arrays["labels"].tolist()]
            about = json.loads(str(arrays["metadata"]))
            rows = torch.from_numpy(arrays["features"])
            return rows, arrays["paths"].tolist(), labels, arrays["splits"].tolist(), about
    table = pq.read_table(file)
    rows = torch.from_numpy(np.stack(table["embedding"].to_numpy()))
    texts = [table[name].to_pylist() for name in ("path", "label", "split")]
    return rows, *texts, json.loads(table.schema.metadata[b"cmsf"])


@pytest.mark.parametrize("images", ["in memory", "on the disk", "arrays"])
def test_the_vectors_are_those_of_the_evaluation_bit_for_bit(
    images: str, run: cmsf.Run, photos: Path, tmp_path: Path
) -> None:
    if images == "on the disk":
        run = cmsf.train("cmsf-self-small", photos, tmp_path / "b", quiet=True, workers=0, cache="off", **SMALL)
    elif images == "arrays":
        bars = write_npz(tmp_path / "bars.npz", per_class=20, side=24)
        run = cmsf.train("cmsf-self-small", bars, tmp_path / "b", quiet=True, workers=0, **SMALL)
    assert run.recipe.cache == ("off" if images == "on the disk" else "ram")
    data, extractor = run.data(), FeatureExtractor(run.backbone(), run.preprocessing)
    assert data.test is not None
    found = run.embed(workers=0)
    assert torch.equal(found.features, torch.cat([extractor(data.train), extractor(data.test)]))
    assert found.paths == [*data.train.paths, *data.test.paths]
    assert found.labels == [*Labels(torch.cat([data.train.truth, data.test.truth]), data.classes).to_names()]
    assert found.splits == ["train"] * len(data.train) + ["test"] * len(data.test)


@pytest.mark.parametrize("name", ["f.npz", "f.parquet"])
def test_a_knn_from_the_file_is_the_evaluations(name: str, run: cmsf.Run, tmp_path: Path) -> None:
    rows, _, labels, splits, _ = read(run.embed(out=tmp_path / name, workers=0))
    train, test = (torch.tensor([split == kind for split in splits]) for kind in ("train", "test"))
    truth = Labels.from_names(labels).number
    votes = classify(rows[test], rows[train], truth[train], KNN_CLASSIFIERS)
    figures = {knn: 100 * float((vote == truth[test]).double().mean()) for knn, vote in votes.items()}
    assert figures == pytest.approx(run.evaluate("knn", workers=0), abs=1e-9)


@pytest.mark.parametrize("name", ["f.npz", "f.parquet", "f.pq"])
def test_a_source_is_embedded_whole_as_its_splits_are(
    name: str, run: cmsf.Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / name
    assert main(arguments(run, out, "--data", photos)) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == [f"84 images, {unit_width(run)} features each", f"features  {out}"]
    assert said.err == ""
    rows, paths, labels, splits, about = read(out)
    own = run.embed(workers=0)
    assert torch.equal(rows, own.features)  # kept in memory or decoded now, an image has the same vector
    assert paths == [f"{split}/{path.split('/', 1)[1]}" for split, path in zip(splits, own.paths, strict=True)]
    assert (labels, splits) == (own.labels, own.splits)
    assert about == {
        "run": str(run.path),
        "weights_sha256": file_sha256(run.folder.backbone_file),
        "data": str(photos),
        "layer": features.LAYER,
        "transform": run.preprocessing.transform,
        "preprocessing": json.loads(json.dumps(run.preprocessing.report() | {"rounded": True})),
        "cmsf": cmsf.__version__,
    }
    assert list(tmp_path.iterdir()) == [out]


def unit_width(run: cmsf.Run) -> int:
    return run.backbone()(torch.zeros(1, 3, 16, 16)).shape[1]


def test_a_parquet_file_has_lists_of_a_fixed_size_and_an_npz_has_no_objects(run: cmsf.Run, tmp_path: Path) -> None:
    width = unit_width(run)
    schema = pq.read_schema(run.embed(out=tmp_path / "f.parquet", workers=0))
    assert schema.names == ["path", "label", "split", "embedding"]
    assert schema.types == [pa.string(), pa.string(), pa.string(), pa.list_(pa.float32(), width)]
    with np.load(run.embed(out=tmp_path / "f.npz", workers=0), allow_pickle=False) as arrays:
        kinds = {name: (arrays[name].dtype.kind, arrays[name].shape) for name in arrays.files}
        assert arrays["features"].dtype == np.float32
    texts = dict.fromkeys(("paths", "labels", "splits"), ("U", (IMAGES,)))
    assert kinds == {"features": ("f", (IMAGES, width)), **texts, "metadata": ("U", ())}


@pytest.mark.parametrize("name", ["f.npz", "f.parquet"])
@pytest.mark.parametrize("parts", [2, 3, None])
@pytest.mark.usefixtures("small_parts")
def test_an_embed_that_was_killed_goes_on_and_its_file_is_the_same_bit_for_bit(
    name: str,
    parts: int | None,
    run: cmsf.Run,
    photos: Path,
    tmp_path: Path,
    computed: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = arguments(run, tmp_path / name, "--data", photos)
    killed(given, parts)
    left = sorted((tmp_path / f".{name}.parts").glob("*.safetensors"))
    assert len(left) == (PARTS if parts is None else parts)
    assert not (tmp_path / name).exists()
    assert main(given) == 0
    there = {2: 64, 3: 66, None: IMAGES}[parts]
    assert sum(computed) == IMAGES - there
    assert f"{min(there, 66)} of 66 images of train were embedded before; going on" in capsys.readouterr().err
    assert (tmp_path / name).exists()
    assert not (tmp_path / f".{name}.parts").exists()
    whole = run.embed(photos, tmp_path / f"whole-{name}", workers=0)
    assert (tmp_path / name).read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("what", ["weights", "an image", "unknown images", "a damaged part", "a missing image"])
@pytest.mark.usefixtures("small_parts")
def test_only_parts_of_the_same_weights_and_images_are_used(
    what: str, run: cmsf.Run, photos: Path, tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cmsf.Run(shutil.copytree(run.path, tmp_path / "run"))
    here = shutil.copytree(photos, tmp_path / "photos")
    source, file = here, tmp_path / "f.npz"
    if what == "unknown images":
        monkeypatch.setattr(Split, "fingerprint", lambda split: None)
    elif what == "a missing image":
        source = tmp_path / "list.csv"
        listed = [str(path) for path in sorted((here / "train").rglob("*.jpg"))]
        source.write_text("\n".join(["path", *listed, "nowhere.jpg"]))
    parts = interrupt(run, source, file, monkeypatch)
    assert len(parts) == 2
    if what == "weights":
        weights = load_file(run.folder.backbone_file)
        save_file({name: 2 * tensor for name, tensor in weights.items()}, run.folder.backbone_file)
    elif what == "an image":
        first = min((here / "train").rglob("*.jpg"))
        Image.new("RGB", (50, 50), "red").save(first)
    elif what == "a damaged part":
        parts[0].write_bytes(parts[0].read_bytes()[:-4] + b"\0\0\0\0")
    computed.clear()
    found = read(run.embed(source, file, workers=0))[0]
    again = {"weights": IMAGES, "an image": IMAGES, "unknown images": IMAGES, "a damaged part": 20 + PART}
    assert sum(computed) == again.get(what, 66 - 64)
    assert torch.equal(found, run.embed(source, workers=0).features)
    assert not (tmp_path / ".f.npz.parts").exists()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", ["f.npz", "f.parquet"])
def test_images_that_cannot_be_read_are_left_out_and_named(
    name: str, workers: int, run: cmsf.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    good = ["größe 写真.png", "a,b.png", "new\nline.png"]
    for number, image in enumerate(good):
        Image.new("RGB", (30 + number, 20), (90 * number, 10, 200)).save(folder / image)
    for broken in ("b.jpg", "c.png"):
        (folder / broken).write_text("no image")
    out = tmp_path / name
    given = arguments(run, out, "--data", folder)
    given[given.index("--workers") + 1] = str(workers)
    assert main(given) == 0
    assert "left out, for they cannot be read: 2 of 5 images (b.jpg, c.png)" in capsys.readouterr().err
    rows, paths, labels, splits, _ = read(out)
    assert paths == sorted(good)
    assert (labels, splits) == ([None] * 3, ["train"] * 3)
    found = run.embed(folder, workers=0)
    assert torch.equal(rows, found.features)
    assert (found.paths, found.labels) == (paths, labels)


def test_what_cannot_be_embedded_or_written_is_refused_and_leaves_nothing(
    run: cmsf.Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, message in (
        (tmp_path, "expected a .npz or .parquet or .pq file"),
        (tmp_path / "no" / "f.npz", "expected a file in an existing folder"),
        (tmp_path / "f.csv", "expected a .npz or .parquet or .pq file"),
    ):
        assert message in refusal(capsys, *arguments(run, out, "--data", photos))
    assert "no such run" in refusal(capsys, "embed", tmp_path / "nowhere")
    with pytest.raises(cmsf.BadInput, match="File name too long; give another --out"):
        run.embed(photos, tmp_path / f"{'x' * 248}.npz", workers=0)
    (tmp_path / "broken").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "broken" / name).write_text("no image")
    message = "none of 2 images can be read (the first is a.png: not an image, or of an unknown kind); repair them"
    assert message in refusal(capsys, *arguments(run, tmp_path / "f.npz", "--data", tmp_path / "broken"))
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_two_processes_do_not_write_the_same_file(
    run: cmsf.Run, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, parts = tmp_path / "f.npz", tmp_path / ".f.npz.parts"
    parts.mkdir()
    with hold_lock(parts / ".lock", "it is held"):
        said = refusal(capsys, *arguments(run, out, "--data", photos))
        assert f"{out} is being written by process {os.getpid()}; wait for it, or stop it" in said
    assert main(arguments(run, out, "--data", photos)) == 0


def embed_in_small_parts(given: list[str]) -> int:
    set_small_parts(pytest.MonkeyPatch())
    return main(given)


@pytest.mark.parametrize("name", ["f.npz", "f.parquet"])
def test_a_full_disk_keeps_the_parts_and_no_half_of_a_file(
    name: str, run: cmsf.Run, photos: Path, tmp_path: Path, computed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_small_parts(monkeypatch)
    given = arguments(run, tmp_path / name, "--data", photos)
    room = 4 * unit_width(run) * IMAGES * 3 // 4  # for any part, but not for the whole
    computed.clear()
    process = Started(embed_in_small_parts, given, limit=room)
    assert process.wait() == 2, process.said()
    assert f"cannot write {tmp_path / name}: File too large" in process.said()
    assert "Traceback" not in process.said()
    assert [path.name for path in tmp_path.iterdir()] == [f".{name}.parts"]
    assert main(given) == 0
    assert computed == []
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", ["f.npz", "f.parquet"])
def test_no_more_than_two_blocks_are_in_memory_at_once(name: str, tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    rows = unit(6 * PART, 8, 0).float()
    most = 0

    def blocks() -> Iterator[torch.Tensor]:
        nonlocal most
        for block in rows.split(PART):
            copy = block.clone()
            alive.append(weakref.ref(copy.untyped_storage()))
            most = max(most, sum(one() is not None for one in alive))
            yield copy
            del copy

    texts = [str(number) for number in range(len(rows))]
    write_embeddings(tmp_path / name, blocks(), 8, Names(texts, [None] * len(rows), ["train"] * len(rows)), {"a": "b"})
    assert most <= 2
    found = read(tmp_path / name)
    assert torch.equal(found[0], rows)
    assert found[1:] == (texts, [None] * len(rows), ["train"] * len(rows), {"a": "b"})
