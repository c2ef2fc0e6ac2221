"""Lists of images and of labels, as spreadsheets and scripts write them."""

from pathlib import Path
from unicodedata import normalize

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cmsf.data import Dataset, open_source
from cmsf.data.prepare import load_dataset as load_images
from cmsf.data.sources.table import read_label_list, read_mapping, read_table, write_csv
from cmsf.recipes.recipe import Recipe
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.errors import BadInput


def put(place: Path, shade: int = 0) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (shade, 0, 7)).save(place, format="PNG")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six images in two classes, and room beside them."""
    for shade, name in enumerate(("cat/0.png", "cat/1.png", "cat/2.png", "dog/0.png", "dog/1.png", "dog/2.png")):
        put(tmp_path / "photos" / name, shade)
    return tmp_path


def write(file: Path, *lines: str, end: str = "\n", encoding: str = "utf-8") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes("".join(line + end for line in lines).encode(encoding))
    return file


def write_parquet(place: Path, /, **columns) -> Path:
    pq.write_table(pa.table(columns), place)
    return place


def load_dataset(source: Path, labels: Path | None = None, val: Path | None = None, **settings) -> Dataset:
    other = None if val is None else open_source(val)
    return load_images(open_source(source), Recipe(**settings), 32, labels=labels, val=other)


def matched(source: Path, labels: Path) -> dict[str, str | None]:
    """What a list says of each training image, before any is held out."""
    opened = open_source(source)
    return dict(zip(opened.train.images.paths, read_label_list(opened, labels)["train"], strict=True))


# Lists of images


def test_a_list_names_images_relative_to_itself(folder: Path) -> None:
    file = write(folder / "lists" / "a.csv", "path,label", "../photos/cat/0.png,cat", "../photos/dog/2.png,dog")
    source = open_source(file)
    assert (source.name, source.classes) == ("a", ("cat", "dog"))
    assert source.train.images.decode(1, 64)[:, 0, 0].tolist() == [5, 0, 7]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_a_table_is_read_as_any_program_writes_it(
    end: str, encoding: str, delimiter: str, suffix: str, folder: Path
) -> None:
    rows = [("path", "label"), ("photos/cat/0.png", "Kätzchen"), ("photos/dog/0.png", "犬")]
    lines = [delimiter.join(row) for row in rows]
    source = open_source(write(folder / f"list.{suffix}", *lines, end=end, encoding=encoding))
    assert source.train.images.paths == ["photos/cat/0.png", "photos/dog/0.png"]
    assert source.train.names == ["Kätzchen", "犬"]


def test_quotes_keep_commas_together(tmp_path: Path) -> None:
    put(tmp_path / 'a, "b".png')
    file = write(tmp_path / "list.csv", '"path","label"', '"a, ""b"".png","cat, black"')
    source = open_source(file)
    assert source.train.images.paths == ['a, "b".png']
    assert source.train.names == ["cat, black"]
    assert source.train.images.size(0) == (10, 12)


def test_columns_come_in_any_order_and_others_are_left_alone(folder: Path) -> None:
    file = write(folder / "list.csv", "id, Label ,note,PATH", "1,cat,x,photos/cat/0.png", "2,dog,,photos/dog/0.png")
    source = open_source(file)
    assert source.train.images.paths == ["photos/cat/0.png", "photos/dog/0.png"]
    assert source.train.names == ["cat", "dog"]


def test_a_blank_label_and_minus_one_are_none(folder: Path) -> None:
    lines = [
        "photos/cat/0.png,",
        "photos/cat/1.png,-1",
        "photos/cat/2.png,  ",
        "photos/dog/0.png,0",
        "photos/dog/1.png,1",
    ]
    data = load_dataset(write(folder / "list.csv", "path,label", *lines), val=folder / "photos")
    assert data.train.truth.tolist() == [UNKNOWN, UNKNOWN, UNKNOWN, 0, 1]


def test_a_list_without_labels_is_an_unlabelled_pile(folder: Path) -> None:
    source = open_source(write(folder / "list.csv", "path", "photos/cat/0.png", "photos/dog/0.png"))
    assert source.train.names == [None, None]
    assert source.classes == ()


def test_blank_lines_are_passed_over(folder: Path) -> None:
    file = write(folder / "list.csv", "path,label", "", "photos/cat/0.png,cat", "", "photos/dog/0.png,dog", "", "")
    assert len(open_source(file).train) == 2


def test_numbers_as_classes_are_ordered_by_value(folder: Path) -> None:
    lines = [f"photos/cat/{i}.png,{label}" for i, label in enumerate(("10", "9", "100"))]
    assert open_source(write(folder / "list.csv", "path,label", *lines)).classes == ("9", "10", "100")
    lines[0] = "photos/cat/0.png,ten"
    assert open_source(write(folder / "list.csv", "path,label", *lines)).classes == ("100", "9", "ten")


def test_a_column_split_names_the_splits(folder: Path) -> None:
    parts = ["train", "TRAIN", "", "val", "test", "test"]
    names = ["cat/0", "dog/0", "cat/1", "dog/1", "cat/2", "dog/2"]
    rows = [f"photos/{name}.png,{name[:3]},{part}" for name, part in zip(names, parts, strict=True)]
    source = open_source(write(folder / "list.csv", "path,label,split", *rows))
    assert {name: len(part) for name, part in source.splits.items()} == {"train": 3, "val": 1, "test": 2}
    data = load_dataset(folder / "list.csv")
    assert (len(data.train), data.test_origin) == (3, "2 images of test")
    (note,) = data.notes
    assert note.startswith("val with 1 image")
    assert note.endswith("is set aside; test is evaluated on")


@pytest.mark.parametrize("name", ["val", "valid", "validation", "Val"])
def test_validation_has_many_names(name: str, folder: Path) -> None:
    rows = ["photos/cat/0.png,cat,trainval", f"photos/dog/0.png,dog,{name}"]
    assert set(open_source(write(folder / "list.csv", "path,label,split", *rows)).splits) == {"train", "val"}


def test_absolute_paths_are_what_they_are(folder: Path) -> None:
    paths = [str(folder / "photos" / name) for name in ("cat/0.png", "dog/0.png")]
    file = write(folder / "far" / "list.csv", "path,label", *(f"{path},{i}" for i, path in enumerate(paths)))
    source = open_source(file)
    assert source.train.images.paths == paths
    assert source.train.images.decode(1, 64)[0, 0, 0] == 3


def test_an_image_that_is_not_there_is_named(folder: Path) -> None:
    file = write(folder / "list.csv", "path,label", "photos/cat/0.png,cat", "photos/cat/9.png,cat")
    with pytest.raises(BadInput, match=r"cannot read 1 image \(photos/cat/9\.png: no such file\)"):
        load_dataset(file)


PARQUET_LABELS = [
    (pa.array([7, -1, None, 40]), ["7", None, None, "40"]),
    (pa.array([7.0, -1.0, float("nan"), 40.0]), ["7", None, None, "40"]),
    (pa.array([0.5, None, 7.0, 40.0]), ["0.5", None, "7", "40"]),
    (pa.array(["cat", "", None, "dog"]), ["cat", None, None, "dog"]),
    (pa.array([3, 200, 0, 255], pa.uint8()), ["3", "200", "0", "255"]),
    (pa.array(["cat", "dog", "cat", None]).dictionary_encode(), ["cat", "dog", "cat", None]),
]


@pytest.mark.parametrize(("given", "wanted"), PARQUET_LABELS, ids=lambda value: str(getattr(value, "type", "")))
def test_parquet_holds_labels_of_any_type(given: pa.Array, wanted: list[str | None], folder: Path) -> None:
    paths = [f"photos/{name}.png" for name in ("cat/0", "cat/1", "dog/0", "dog/1")]
    source = open_source(write_parquet(folder / "list.parquet", path=paths, label=given, other=[1, 2, 3, 4]))
    assert source.train.images.paths == paths
    assert source.train.names == wanted


def test_parquet_may_have_splits_and_no_labels(folder: Path) -> None:
    columns = {"path": ["photos/cat/0.png", "photos/cat/1.png"], "split": ["train", "test"]}
    source = open_source(write_parquet(folder / "list.pq", **columns))
    assert set(source.splits) == {"train", "test"}
    assert source.classes == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"file,label\na.png,cat\n", "has the columns file, label; it needs path (or index) and label"),
        (b"path,label\na.png,cat\nb.png,dog\na.png,dog\n", "lists a.png twice, in rows 1 and 3; keep one of them"),
        (b"path,label\na.png,cat\nb.png,dog,3\n", "row 2 of list.csv has 3 fields and the first line 2"),
        (b"path,label\na.png,cat\nb.png\n", "row 2 of list.csv has 1 field"),
        ("path,label\ncafé.png,cat\n".encode("latin-1"), "a list is text in UTF-8"),
        ("path,label\na.png,cat\n".encode("utf-16"), "a list is text in UTF-8"),
        (b"", "list.csv is empty; it needs a first line path,label"),
        (b"\n\n", "list.csv is empty; it needs a first line path,label"),
        (b"path,label\n", "list.csv lists no images"),
        (b"path,label,split\na.png,cat,training\n", "a split called 'training'; use train, val and test"),
        (b"path,label,split\na.png,cat,test\n", "has no images in the split train"),
        (b"path,label\n,cat\n", "row 1 of list.csv has no path"),
        (b"index,label\n0,cat\n", "has no column path, and without paths it is not a list of images"),
        (b'path,label\n"a.png,cat\n', "cannot read list.csv"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(
    content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("list.csv").write_bytes(content)
    with pytest.raises(BadInput) as caught:
        open_source("list.csv")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_wrong_with_a_parquet_list_is_said(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("path,label\n")
    with pytest.raises(BadInput, match=r"cannot read .*text\.parquet"):
        open_source(tmp_path / "text.parquet")
    with pytest.raises(BadInput, match="has the columns file, label; it needs path"):
        open_source(write_parquet(tmp_path / "a.parquet", file=["a"], label=[1]))
    with pytest.raises(BadInput, match=r"row 2 of .* has no path"):
        open_source(write_parquet(tmp_path / "b.parquet", path=["a", None], label=[1, 2]))
    with pytest.raises(BadInput, match="lists a twice"):
        open_source(write_parquet(tmp_path / "c.parquet", path=["a", "a"], label=[1, 2]))


@pytest.mark.parametrize("name", ["a,b", 'a"b', "a;b", "a'b", "猫", "a\tb", "a\nb", "a\u2028b", "a\x85b", "a\x0bb"])
def test_what_cmsf_writes_it_reads_again_whatever_an_image_is_called(name: str, tmp_path: Path) -> None:
    """A file may be called anything but / and zero."""
    rows = [(f"{name}.png", "cat"), (f"x/{name}", None), (name, "dog")]
    write_csv(tmp_path / "list.csv", ("path", "label"), rows)
    table = read_table(tmp_path / "list.csv")
    assert list(zip(table.keys, table.labels, strict=True)) == rows


# Lists of labels


def test_labels_are_matched_by_the_path_below_the_source(folder: Path) -> None:
    file = write(folder / "far" / "labels.csv", "path,label", "cat/0.png,tabby", "./dog/1.png,pug", "dog\\2.png,pug")
    known = matched(folder / "photos", file)
    assert {path: name for path, name in known.items() if name} == {
        "cat/0.png": "tabby",
        "dog/1.png": "pug",
        "dog/2.png": "pug",
    }
    assert len(known) == 6


def test_labels_are_matched_by_the_path_relative_to_the_list(folder: Path) -> None:
    rows = ["../photos/cat/0.png,tabby", f"{folder}/photos/dog/1.png,pug"]
    known = matched(folder / "photos", write(folder / "far" / "labels.csv", "path,label", *rows))
    assert {path: name for path, name in known.items() if name} == {"cat/0.png": "tabby", "dog/1.png": "pug"}


def test_labels_relative_to_the_list_are_matched_through_linked_folders(folder: Path) -> None:
    for i in range(3):
        put(folder / "elsewhere" / f"{i}.png", 9)
    (folder / "photos" / "fox").symlink_to(folder / "elsewhere", target_is_directory=True)
    file = write(folder / "labels.csv", "path,label", "photos/cat/0.png,tabby", "photos/fox/1.png,red")
    known = matched(folder / "photos", file)
    assert {path: name for path, name in known.items() if name} == {"cat/0.png": "tabby", "fox/1.png": "red"}


@pytest.mark.parametrize("style", ["../photos/{}", "{folder}/photos/{}", "./../photos/{}"])
def test_labels_are_matched_to_the_images_of_a_list_elsewhere(style: str, folder: Path) -> None:
    names = ["cat/0.png", "cat/1.png", "dog/0.png"]
    lines = [style.format(name, folder=folder) + f",{name[:3]}" for name in names]
    images = write(folder / "lists" / "images.csv", "path,label", *lines)
    labels = write(folder / "labels.csv", "path,label", "photos/cat/1.png,tabby", "photos/dog/0.png,pug")
    assert list(matched(images, labels).values()) == [None, "tabby", "pug"]


def test_labels_are_matched_however_letters_are_composed(tmp_path: Path) -> None:
    for i, name in enumerate(("é.png", "ü.png")):
        put(tmp_path / "photos" / normalize("NFD", name), i)
    file = write(tmp_path / "labels.csv", "path,label", *(normalize("NFC", f"{name}.png,{name}") for name in "éü"))
    assert sorted(filter(None, matched(tmp_path / "photos", file).values())) == ["é", "ü"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_labels_are_matched_by_index(kind: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((5, 8, 8), np.uint8), y=np.arange(5) % 2)
    if kind == "csv":
        file = write(tmp_path / "labels.csv", "index,label", "3,red", "0,blue", "4,")
    else:
        file = write_parquet(tmp_path / "labels.parquet", index=[3, 0, 4], label=["red", "blue", None])
    data = load_dataset(tmp_path / "a.npz", file, val=tmp_path / "a.npz")
    assert data.test.label.tolist() == [UNKNOWN] * 5  # the same images, but to be tested on
    assert data.label_names == ("blue", "red")
    assert data.train.label.tolist() == [0, UNKNOWN, UNKNOWN, 1, UNKNOWN]
    assert data.train.truth.tolist() == [0, 1, 0, 1, 0]


def test_labels_of_arrays_are_matched_by_what_stands_for_a_path(tmp_path: Path) -> None:
    images = np.zeros((4, 8, 8), np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images, y_train=np.arange(4) % 2, x_test=images[:2], y_test=np.arange(2))
    data = load_dataset(tmp_path / "a.npz", write(tmp_path / "labels.csv", "path,label", "x_train/2,red", "x_train/1,"))
    assert data.train.label.tolist() == [UNKNOWN, UNKNOWN, 0, UNKNOWN]


def test_what_is_unlisted_or_blank_or_minus_one_is_unlabelled(folder: Path) -> None:
    rows = ["cat/0.png,", "cat/1.png,-1", "dog/0.png,pug"]
    data = load_dataset(folder / "photos", write(folder / "labels.csv", "path,label", *rows), val=folder / "photos")
    assert (data.train.label != UNKNOWN).sum() == 1
    assert data.label_names == ("pug",)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["path,label", "cat/0.png,a", "cat/7.png,a", "cow/0.png,b"], "2 of 3 rows of"),
        (
            ["path,label", "cat/0.png,a", "cat/7.png,a", "cow/0.png,b"],
            "(the first is cat/7.png); paths look like cat/0.png",
        ),
        (["index,label", "0,a", "6,b"], "1 of 2 rows of"),
        (["index,label", "0,a", "6,b"], "index is a whole number below 6"),
        (["index,label", "zero,a"], "1 of 1 rows of"),
        (["index,label", "-1,a"], "1 of 1 rows of"),
    ],
)
def test_rows_for_images_that_are_not_there_are_refused_with_their_count(
    lines: list[str], message: str, folder: Path
) -> None:
    with pytest.raises(BadInput) as caught:
        load_dataset(folder / "photos", write(folder / "labels.csv", *lines))
    assert message in str(caught.value)


def test_a_list_of_labels_needs_a_column_for_them(folder: Path) -> None:
    file = write(folder / "labels.csv", "path,class", "cat/0.png,tabby")
    with pytest.raises(BadInput, match=r"has no column label"):
        load_dataset(folder / "photos", file)


def test_a_list_of_labels_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(BadInput, match=r"cannot read .*nowhere\.csv"):
        load_dataset(folder / "photos", folder / "nowhere.csv")


def test_one_image_under_two_spellings_is_there_twice(folder: Path) -> None:
    file = write(folder / "labels.csv", "path,label", "cat/0.png,tabby", "./cat/0.png,pug")
    with pytest.raises(BadInput, match=r"lists .*cat/0\.png twice"):
        load_dataset(folder / "photos", file)


def test_the_source_s_own_labels_stay_the_truth(folder: Path) -> None:
    rows = ["cat/0.png,dog", "dog/0.png,cat", "dog/1.png,wolf"]
    data = load_dataset(folder / "photos", write(folder / "labels.csv", "path,label", *rows), val=folder / "photos")
    assert data.classes == ("cat", "dog")
    assert data.label_names == ("cat", "dog", "wolf")
    assert data.train.truth.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.test.truth.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.train.label.tolist() == [1, UNKNOWN, UNKNOWN, 0, 2, UNKNOWN]


def test_a_list_of_labels_does_not_change_what_is_held_out(tmp_path: Path) -> None:
    for i in range(40):
        put(tmp_path / "photos" / f"{i % 2}" / f"{i}.png", i)
    rows = [f"{i % 2}/{i}.png,{i % 3}" for i in range(0, 40, 4)]
    plain = load_dataset(tmp_path / "photos")
    data = load_dataset(tmp_path / "photos", write(tmp_path / "labels.csv", "path,label", *rows))
    assert data.test.paths == plain.test.paths
    assert data.test.truth.tolist() == plain.test.truth.tolist()
    lost = sum(f"{path}," in ",".join(rows) for path in data.test.paths)
    assert (lost > 0) == any(f"{lost} of 10 listed labels" in note for note in data.notes)


def test_a_source_without_labels_takes_the_list_s_as_the_truth(tmp_path: Path) -> None:
    for i in range(40):
        put(tmp_path / "photos" / f"{i:02d}.png", i)
    rows = [f"{i:02d}.png,{'ab'[i % 2]}" for i in range(20)]
    data = load_dataset(tmp_path / "photos", write(tmp_path / "labels.csv", "path,label", *rows))
    assert data.classes == data.label_names == ("a", "b")
    assert (len(data.train), len(data.test)) == (38, 2)
    assert data.test_origin == "2 of 20 labelled images, held out by seed 0"
    for split in (data.train, data.test):
        numbers = [int(path[:2]) for path in split.paths]
        assert split.truth.tolist() == [number % 2 if number < 20 else UNKNOWN for number in numbers]
    assert data.train.label.tolist() == data.train.truth.tolist()


def test_a_list_may_label_the_test_images_of_a_source_without_labels(tmp_path: Path) -> None:
    for part, count in (("train", 4), ("test", 2)):
        for i in range(count):
            put(tmp_path / "photos" / part / f"{i}.png", i)
    rows = ["train/0.png,a", "train/1.png,b", "test/0.png,b", "test/1.png,a"]
    data = load_dataset(tmp_path / "photos", write(tmp_path / "labels.csv", "path,label", *rows))
    assert data.train.label.tolist() == [0, 1, UNKNOWN, UNKNOWN]
    assert data.test.truth.tolist() == [1, 0]
    assert data.test.label.tolist() == [UNKNOWN] * 2


# Mappings


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("names", [("class", "group"), ("label", "group"), ("fine", "label"), ("path", "superclass")])
def test_a_mapping_has_two_columns_of_any_name(kind: str, names: tuple[str, str], tmp_path: Path) -> None:
    classes, groups = ["cat", "dog", "oak"], ["animal", "animal", "plant"]
    if kind == "csv":
        rows = [f"{one},{group}" for one, group in zip(classes, groups, strict=True)]
        file = write(tmp_path / "map.csv", ",".join(names), *rows)
    else:
        file = write_parquet(tmp_path / "map.parquet", **dict(zip(names, (classes, groups), strict=True)))
    assert read_mapping(file) == dict(zip(classes, groups, strict=True))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["class,group,more", "a,b,c"], "has the columns class, group, more; a mapping has two, class and group"),
        (["class", "a"], "has the columns class; a mapping has two"),
        (["class,group", "a,b", "c,"], "row 2 of"),
        (["class,group", "a,b", "a,c"], "puts 'a' into both 'b' and 'c'; keep one of them"),
    ],
)
def test_what_is_wrong_with_a_mapping_is_said(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read_mapping(write(tmp_path / "map.csv", *lines))
    assert message in str(caught.value)
