import io
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cmsf.data.images import Unreadable
from cmsf.data.sources.hugging_face import holds_images, is_saved_dataset, open_hugging_face
from cmsf.utils.errors import BadInput

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")


def _png(red: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (10, 6), (red, 20, 30)).save(stream, "PNG")
    return stream.getvalue()


def _made(
    labels: list[Any], names: list[str] | None = None, column: str = "label", paths: list[str | None] | None = None
) -> Any:
    """A data set whose i-th image has i as its red."""
    kind = datasets.ClassLabel(names=names) if names else datasets.Value("string" if "a" in labels else "int32")
    features = datasets.Features({"image": datasets.Image(), column: kind})
    cells = [
        {"bytes": _png(i), "path": path}
        for i, path in zip(range(len(labels)), paths or [None] * len(labels), strict=True)
    ]
    return datasets.Dataset.from_dict({"image": cells, column: labels}, features=features)


def _reds(images: Any) -> list[int]:
    return [images.open(i).getpixel((0, 0))[0] for i in range(len(images))]


def test_a_saved_dict_has_its_splits_as_parts(tmp_path: Path) -> None:
    splits = {
        "train": _made([1, 0, 1], ["猫", "dog"]),
        "validation": _made([0], ["猫", "dog"]),
        "test": _made([1, 1], ["猫", "dog"]),
        "extra": _made([0, 0], ["猫", "dog"]),
    }
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "pets")
    assert is_saved_dataset(tmp_path / "pets")
    source = open_hugging_face(str(tmp_path / "pets"))
    assert source.name == "pets"
    assert {part: len(images) for part, images in source.splits.items()} == {"train": 3, "val": 1, "test": 2}
    assert source.classes == ("猫", "dog")
    assert source.train.names == ["dog", "猫", "dog"]
    assert _reds(source.train.images) == [0, 1, 2]
    assert list(source.splits["test"].images.paths) == ["test/0", "test/1"]
    assert source.notes == ("splits left alone: extra (2 rows)",)


def test_a_saved_single_set_is_training_images(tmp_path: Path) -> None:
    _made([0, 1], ["a", "b"], paths=["x.png", "y.png"]).save_to_disk(tmp_path / "one")
    assert is_saved_dataset(tmp_path / "one")
    assert not is_saved_dataset(tmp_path)
    source = open_hugging_face(str(tmp_path / "one"))
    assert list(source.splits) == ["train"]
    assert list(source.train.images.paths) == ["train/x.png", "train/y.png"]


def test_names_within_the_table_that_repeat_are_not_used(tmp_path: Path) -> None:
    _made([0, 1], ["a", "b"], paths=["x.png", "x.png"]).save_to_disk(tmp_path / "one")
    assert list(open_hugging_face(str(tmp_path / "one")).train.images.paths) == ["train/0", "train/1"]


def test_a_label_of_minus_one_or_none_is_none(tmp_path: Path) -> None:
    _made([-1, 1, 0, None], ["a", "b"]).save_to_disk(tmp_path / "one")
    assert open_hugging_face(str(tmp_path / "one")).train.names == [None, "b", "a", None]


def test_plain_numbers_and_texts_are_classes_too(tmp_path: Path) -> None:
    _made([10, 9, -1], column="fine_label").save_to_disk(tmp_path / "numbers")
    numbers = open_hugging_face(str(tmp_path / "numbers"))
    assert (numbers.train.names, numbers.classes) == (["10", "9", None], ("9", "10"))
    _made(["b", "a", ""], column="class").save_to_disk(tmp_path / "texts")
    texts = open_hugging_face(str(tmp_path / "texts"))
    assert (texts.train.names, texts.classes) == (["b", "a", None], ("a", "b"))


def test_a_class_label_goes_before_a_plain_column_and_label_before_others(tmp_path: Path) -> None:
    content = _made([0, 1], ["a", "b"], column="fine_label")
    content = content.add_column("label", [5, 6]).add_column("coarse", [0, 0])
    content = content.cast_column("coarse", datasets.ClassLabel(names=["all"]))
    content.save_to_disk(tmp_path / "both")
    assert open_hugging_face(str(tmp_path / "both")).train.names == ["a", "b"]


def test_images_without_classes_are_said(tmp_path: Path) -> None:
    _made([0, 1], column="size").save_to_disk(tmp_path / "plain")
    source = open_hugging_face(str(tmp_path / "plain"))
    assert (source.train.names, source.classes) == ([None, None], ())
    assert "no column of classes (image, size)" in source.notes[0]


def test_a_parquet_file_and_a_folder_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "parquet"
    folder.mkdir()
    for split, labels in (("train", [0, 1, 1]), ("test", [1])):
        _made(labels, ["a", "b"]).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    one = open_hugging_face(str(folder / "train-00000-of-00001.parquet"))
    assert (list(one.splits), one.train.names) == (["train"], ["a", "b", "b"])
    source = open_hugging_face(str(folder))
    assert {part: len(images) for part, images in source.splits.items()} == {"train": 3, "test": 1}
    assert _reds(source.train.images) == [0, 1, 2]


@pytest.mark.parametrize("in_struct", [True, False])
def test_parquet_of_bytes_that_another_program_wrote(tmp_path: Path, in_struct: bool) -> None:
    cells = [{"bytes": _png(i), "path": None} if in_struct else _png(i) for i in range(3)]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if in_struct else pa.binary()
    table = pa.table({"img": pa.array(cells, kind), "label": pa.array(["x", "y", None])})
    file = tmp_path / "own.parquet"
    pq.write_table(table, file)
    assert holds_images(file)
    source = open_hugging_face(str(file))
    assert source.train.names == ["x", "y", None]
    assert _reds(source.train.images) == [0, 1, 2]


def test_a_list_of_paths_holds_no_images(tmp_path: Path) -> None:
    pq.write_table(pa.table({"path": ["a.png"], "label": ["x"]}), tmp_path / "list.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1")
    pq.write_table(pa.table({"path": ["a"], "image": [b"x"]}), tmp_path / "both.parquet")
    for name in ("list", "broken", "both", "nowhere"):
        assert not holds_images(tmp_path / f"{name}.parquet")


def test_a_folder_of_images_with_metadata(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / "folder" / split).mkdir(parents=True)
        for name in ("b", "a"):
            Image.new("RGB", (4, 4), (ord(name), 0, 0)).save(tmp_path / "folder" / split / f"{name}.png")
        (tmp_path / "folder" / split / "metadata.csv").write_text("file_name,label\na.png,cat\nb.png,dog\n")
    source = open_hugging_face(str(tmp_path / "folder"))
    assert list(source.splits) == ["train", "test"]
    labels = dict(zip(source.train.images.paths, source.train.names, strict=True))
    assert labels == {"train/a.png": "cat", "train/b.png": "dog"}
    place = list(source.train.images.paths).index("train/b.png")
    assert source.train.images.open(place).getpixel((0, 0)) == (ord("b"), 0, 0)


def test_images_survive_pickling_by_their_place_on_the_disk(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(256, size=(200, 200, 3), dtype=np.uint8)
    content = datasets.Dataset.from_dict({"image": [Image.fromarray(noise)] * 3})
    content.cast_column("image", datasets.Image()).save_to_disk(tmp_path / "noise")
    images = open_hugging_face(str(tmp_path / "noise")).train.images
    pickled = pickle.dumps(images)
    assert len(pickled) < 20_000 < noise.size
    assert np.array_equal(np.asarray(pickle.loads(pickled).open(2)), noise)


def test_a_row_without_an_image_is_named(tmp_path: Path) -> None:
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": [_png(0), None]}, features=features).save_to_disk(tmp_path / "gap")
    images = open_hugging_face(str(tmp_path / "gap")).train.images
    assert images.size(0) == (6, 10)
    with pytest.raises(Unreadable, match="train/1: the row holds no image"):
        images.decode(1, 6)


def test_a_configuration_follows_an_at_sign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def load(*arguments: Any) -> Any:
        asked.append(arguments)
        return datasets.DatasetDict({"trainval": _made([0], ["a"])})

    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_hugging_face("owner/animals@small")
    assert (source.name, source.train.names) == ("animals", ["a"])
    open_hugging_face("owner/animals")
    assert asked == [("owner/animals", "small"), ("owner/animals", None)]


def test_what_cannot_be_opened_is_said_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="no such file or folder"):
        open_hugging_face(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match="cannot open") as error:
        open_hugging_face(str(tmp_path / "empty"))
    assert "\n" not in str(error.value)
    datasets.Dataset.from_dict({"text": ["a"], "label": [0]}).save_to_disk(tmp_path / "text")
    with pytest.raises(BadInput, match="has the columns text, label, and none of images"):
        open_hugging_face(str(tmp_path / "text"))
    datasets.DatasetDict({"one": _made([0]), "two": _made([0])}).save_to_disk(tmp_path / "odd")
    with pytest.raises(BadInput, match="splits one, two, and none called train"):
        open_hugging_face(str(tmp_path / "odd"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadInput, match="cannot open hf:no-such/set: Couldn't") as error:
        open_hugging_face("no-such/set")
    assert "\n" not in str(error.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"needs the extra: pip install 'cmsf\[hf\]'"):
        open_hugging_face("mnist")
