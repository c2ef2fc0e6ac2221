"""cmsf data and cmsf labels, as they are typed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import write_npz
from PIL import Image

from cmsf.cli import main
from cmsf.data import open_source
from cmsf.data.imagenet import imagenet_100, simclr_files
from cmsf.data.labels import Labels, modify_labels
from cmsf.data.prepare import load_dataset
from cmsf.data.sources.table import read_label_list, read_table
from cmsf.recipes.recipe import Recipe


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What a command prints that goes well."""
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert code == 0, said.err
    return said.out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one line that a command says when it refuses."""
    code = main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert code == 2, said
    lines = [line for line in said.err.splitlines() if line.startswith("cmsf: ")]
    assert len(lines) == 1, said.err
    assert "Traceback" not in said.err
    return lines[0]


def put(place: Path, shade: int = 0, size: tuple[int, int] = (12, 10)) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade % 256, shade // 256, 7)).save(place)
    return place


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Thirty images in three classes, all different, 12 by 10."""
    for i in range(30):
        put(tmp_path / "photos" / ("cat", "dog", "fox")[i % 3] / f"{i:02d}.png", i)
    return tmp_path / "photos"


def is_png(file: Path) -> bool:
    with Image.open(file) as image:
        image.load()
        return image.format == "PNG" and min(image.size) > 50


# cmsf data


def test_counts_classes_and_sizes_are_printed(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(photos / "cat" / "more.png", 99)
    for name in ("notes.txt", "more notes.txt"):
        (photos / name).write_text("no image")
    said = run(capsys, "data", photos, "--out", tmp_path / "sheet.png").splitlines()
    assert said[0] == "photos: 31 images"
    assert said[1] == "  train  31 images, 31 labelled (100 %), 3 classes of 10 to 11"
    assert [line.split() for line in said[2:5]] == [["11", "cat"], ["10", "dog"], ["10", "fox"]]
    assert "sizes: all 12 × 10" in said
    assert "broken: none" in said
    assert "exact duplicates: none" in said
    assert "2 files are not images and were left alone: 2 .txt" in said
    assert said[-1] == f"contact sheet  {tmp_path / 'sheet.png'}"
    assert is_png(tmp_path / "sheet.png")


def test_many_sizes_are_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, size in enumerate([(20, 10), (30, 40), (30, 40), (90, 50)]):
        put(tmp_path / "pile" / f"{i}.png", i, size)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (70, 60)).save(tmp_path / "pile" / "turned.jpg", exif=exif)
    said = run(capsys, "data", tmp_path / "pile", "--out", tmp_path / "sheet.png")
    assert "sizes: shorter side 10 to 60, median 30; 4 different, most often 30 × 40 (40 %)" in said


def test_sizes_are_those_of_the_files_even_where_jpegs_are_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(2):
        put(tmp_path / "pile" / f"{i}.jpg", 99 * i, (1200, 900))
    assert "sizes: all 1200 × 900" in run(capsys, "data", tmp_path / "pile", "--out", tmp_path / "sheet.png")


def test_the_share_of_labelled_images_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.arange(8 * 64, dtype=np.uint16).astype(np.uint8).reshape(8, 8, 8)
    np.savez(tmp_path / "some.npz", x=images, y=np.array([0, 1, -1, -1, -1, -1, 0, -1]))
    said = run(capsys, "data", tmp_path / "some.npz", "--out", tmp_path / "sheet.png")
    assert "8 images, 3 labelled (37.5 %), 2 classes of 1 to 2" in said
    np.savez(tmp_path / "none.npz", x=images)
    said = run(capsys, "data", tmp_path / "none.npz", "--out", tmp_path / "sheet.png")
    assert "8 images, 0 labelled (0 %)\n" in said


def test_of_many_classes_the_largest_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "many.npz", x=images, y=np.r_[np.arange(20), np.full(40, 7)])
    said = run(capsys, "data", tmp_path / "many.npz", "--out", tmp_path / "sheet.png").splitlines()
    assert said[2].split() == ["41", "7"]
    assert any("… and 10 classes more" in line for line in said)


def test_broken_images_are_counted_and_named(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c", "d"):
        (photos / "cat" / f"{name}.jpg").write_text("no image")
    said = run(capsys, "data", photos, "--out", tmp_path / "sheet.png")
    assert "broken: 4 images cannot be read (train with --skip-broken)" in said
    assert "  cat/a.jpg: not an image, or of an unknown kind" in said
    assert "… and 1 more" in said
    assert is_png(tmp_path / "sheet.png")


def test_a_pile_of_broken_images_alone_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        put(tmp_path / "pile" / f"{name}.jpg").write_text("no image")
    assert "none of the images can be read" in refusal(
        capsys, "data", tmp_path / "pile", "--out", tmp_path / "sheet.png"
    )
    assert not (tmp_path / "sheet.png").exists()


def test_exact_duplicates_are_found_by_pixels(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.open(photos / "cat" / "00.png").save(photos / "cat" / "copy.tif")
    Image.open(photos / "cat" / "00.png").save(photos / "cat" / "other.bmp")
    Image.open(photos / "dog" / "01.png").save(photos / "dog" / "copy.tif")
    Image.new("RGB", (10, 12), (3, 0, 7)).save(photos / "cat" / "same bytes, other shape.png")
    said = run(capsys, "data", photos, "--out", tmp_path / "sheet.png")
    assert "exact duplicates: 3 images with the same pixels as another, in 2 groups" in said
    assert "  cat/00.png = cat/copy.tif = cat/other.bmp" in said
    assert "split" not in said
    assert "different classes" not in said


def test_duplicates_across_splits_and_classes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(6):
        put(tmp_path / "set" / "train" / ("cat", "dog")[i % 2] / f"{i}.png", i)
    put(tmp_path / "set" / "test" / "cat" / "leak.png", 2)
    put(tmp_path / "set" / "test" / "dog" / "contradiction.png", 4)
    put(tmp_path / "set" / "test" / "dog" / "new.png", 50)
    said = run(capsys, "data", tmp_path / "set", "--out", tmp_path / "sheet.png")
    assert "  train  6 images" in said
    assert "  test   3 images" in said
    assert "exact duplicates: 2 images with the same pixels as another, in 2 groups" in said
    groups = [set(line.split(" = ")) for line in map(str.strip, said.splitlines()) if " = " in line]
    assert {"train/cat/2.png", "test/cat/leak.png"} in groups
    assert {"train/cat/4.png", "test/dog/contradiction.png"} in groups
    assert "  2 groups in more than one split: test images leak into training" in said
    assert "  1 group of different classes (first: cat against dog)" in said


def test_the_contact_sheet_is_called_after_the_source(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(capsys, "data", photos)
    assert is_png(tmp_path / "photos-contact-sheet.png")


def test_a_contact_sheet_is_drawn_of_names_in_any_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i, name in enumerate(("猫", "قطة", "🐈", "$x$", "a\\b{", "")):
        put(tmp_path / "pile" / name / "x" / f"{i}.png", i)
    for i in range(2):
        put(tmp_path / "classes" / ("猫 $\\frac", "_^")[i] / f"{i}.png", i)
    for name in ("pile", "classes"):
        run(capsys, "data", tmp_path / name, "--out", tmp_path / f"{name}.png")
        assert is_png(tmp_path / f"{name}.png")


IMPOSSIBLE = ["nowhere/x{}", "file.txt/x{}", ".", "x" * 300 + "{}", "x" * 300 + "/y{}"]


@pytest.mark.parametrize("place", IMPOSSIBLE, ids=["no-folder", "file", "folder", "long", "long-folder"])
@pytest.mark.parametrize(("command", "suffix"), [("data", ".png"), ("labels", ".csv")])
def test_an_impossible_place_is_refused_in_one_line(
    command: str, suffix: str, place: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.txt").write_text("a file")
    out = f"{tmp_path}/{place.format(suffix)}"
    assert "--out" in refusal(capsys, command, photos, "--out", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.txt", "photos"]
    assert (tmp_path / "file.txt").read_text() == "a file"


def test_a_source_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("data", "labels"):
        assert "no such file or folder" in refusal(capsys, command, tmp_path / "nowhere")


# cmsf labels


def as_source(file: Path) -> dict[str, str | None]:
    """Labels by the real file."""
    part = open_source(file).train
    return {str((file.parent / path).resolve()): name for path, name in zip(part.images.paths, part.names, strict=True)}


def as_labels(photos: Path, file: Path) -> dict[str, str | None]:
    """Labels by the real file, as training would know them with --labels."""
    source = open_source(photos)
    known = zip(source.train.images.paths, read_label_list(source, file)["train"], strict=True)
    return {str((photos / path).resolve()): name for path, name in known if name is not None}


@pytest.mark.parametrize("place", ["x.csv", "photos/x.csv", "lists/deep/x.csv"])
def test_a_list_serves_as_data_and_as_labels_alike(
    place: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / place
    out.parent.mkdir(parents=True, exist_ok=True)
    said = run(capsys, "labels", photos, "--share", "0.5", "--noise", "0.4", "--seed", "3", "--out", out)
    assert "15 of 30 training images labelled (50 %)" in said
    assert f"list  {out}" in said
    part = open_source(photos).train
    wanted = modify_labels(Labels.from_names(part.names), share=0.5, noise=0.4, seed=3)
    by_file = {
        str((photos / path).resolve()): name
        for path, name in zip(part.images.paths, wanted.to_names(), strict=True)
        if name is not None
    }
    assert len(by_file) == 15
    assert as_source(out) == by_file
    assert as_labels(photos, out) == by_file


def test_the_recipe_s_options_give_the_labels_of_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
    arrays = {"x_train": images[:48], "y_train": np.arange(48) % 4, "x_test": images[48:], "y_test": np.arange(12) % 4}
    np.savez(tmp_path / "a.npz", **arrays)
    run(
        capsys,
        "labels",
        tmp_path / "a.npz",
        "--per-class",
        "5",
        "--noise",
        "0.5",
        "--seed",
        "2",
        "--out",
        tmp_path / "x.csv",
    )
    source = open_source(tmp_path / "a.npz")
    listed = load_dataset(source, Recipe(), 16, labels=tmp_path / "x.csv")
    direct = load_dataset(source, Recipe(labels_per_class=5, label_noise=0.5, seed=2), 16)
    assert len(direct.train.labelled) == 20
    assert (
        Labels(listed.train.label, listed.label_names).to_names()
        == Labels(direct.train.label, direct.label_names).to_names()
    )
    assert torch.equal(listed.train.truth, direct.train.truth)


def test_the_real_corruption_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_npz(tmp_path / "bars.npz", per_class=100, classes=4, side=8)
    said = run(capsys, "labels", tmp_path / "bars.npz", "--noise", "0.3", "--out", tmp_path / "x.csv")
    own = Labels.from_names(open_source(tmp_path / "bars.npz").train.names)
    wrong = sum(one != other for one, other in zip(own.to_names(), read_table(tmp_path / "x.csv").labels, strict=True))
    assert 80 < wrong < 160
    assert f"{wrong} of 400 labels replaced by the noise ({wrong / 4:.2f} %)" in said
    said = run(capsys, "labels", tmp_path / "bars.npz", "--labels", tmp_path / "x.csv")
    assert f"{wrong} of 400 labels other than the source's own ({wrong / 4:.2f} %)" in said


def test_without_a_place_a_list_is_only_looked_at(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run(capsys, "labels", photos, "--per-class", "4")
    assert said.splitlines()[0] == "photos: 12 of 30 training images labelled (40 %), 3 classes of 4 to 4"
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_labels_are_those_of_the_training_part_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, count in (("train", 6), ("val", 4)):
        for i in range(count):
            put(tmp_path / "set" / part / ("cat", "dog")[i % 2] / f"{i}.png", i)
    run(capsys, "labels", tmp_path / "set", "--out", tmp_path / "x.csv")
    assert [path for path in read_table(tmp_path / "x.csv").keys if "/val/" in path] == []
    assert len(read_table(tmp_path / "x.csv").keys) == 6


def test_coarse_labels_come_from_a_file_or_from_wordnet(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "map.csv").write_text("class,group\ncat,feline\ndog,canine\nfox,canine\n")
    said = run(capsys, "labels", photos, "--coarse", tmp_path / "map.csv", "--out", tmp_path / "x.csv")
    assert "2 classes of 10 to 20" in said
    assert set(read_table(tmp_path / "x.csv").labels) == {"feline", "canine"}
    assert "wordnet has no group for 3 of 3 classes (the first is 'cat')" in refusal(
        capsys, "labels", photos, "--coarse", "wordnet"
    )


def test_imagenet_100_and_simclr_s_files_are_chosen_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = sorted(simclr_files(1))
    inside = next(file for file in one if file[:9] in imagenet_100())
    outside = next(file for file in one if file[:9] not in imagenet_100())
    ten = next(file for file in sorted(simclr_files(10) - simclr_files(1)) if file[:9] == inside[:9])
    for i, name in enumerate((inside, outside, ten, f"{inside[:9]}_0.JPEG", f"{outside[:9]}_0.JPEG")):
        put(tmp_path / "imagenet" / name[:9] / name, i)

    def listed(*flags: str) -> list[str]:
        run(capsys, "labels", tmp_path / "imagenet", *flags, "--out", tmp_path / "x.csv")
        return sorted(Path(path).name for path in read_table(tmp_path / "x.csv").keys)

    assert listed("--subset", "simclr-1") == sorted([inside, outside])
    assert listed("--subset", "simclr-10") == sorted([inside, outside, ten])
    assert listed("--classes", "imagenet-100") == sorted([inside, ten, f"{inside[:9]}_0.JPEG"])
    assert listed("--classes", "imagenet-100", "--subset", "simclr-1") == [inside]
    said = run(capsys, "labels", tmp_path / "imagenet", "--subset", "simclr-1")
    assert "12,809 of the 12,811 files of simclr-1 are not there" in said


def test_classes_and_files_may_be_listed_one_a_line(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "classes.txt").write_text("cat\n\n fox \nwolf\n")
    said = run(capsys, "labels", photos, "--classes", tmp_path / "classes.txt")
    assert "20 of 30 training images labelled (66.7 %), 2 classes of 10 to 10" in said
    (tmp_path / "files.txt").write_text("cat/00.png\n01.png\nno.png\n")
    said = run(capsys, "labels", photos, "--subset", tmp_path / "files.txt", "--out", tmp_path / "x.csv")
    assert "1 of the 3 files of" in said
    assert read_table(tmp_path / "x.csv").keys == ["photos/cat/00.png", "photos/dog/01.png"]
    (tmp_path / "files.txt").write_text("no.png\n")
    assert "none of the 1 file" in refusal(capsys, "labels", photos, "--subset", tmp_path / "files.txt")
    assert "cannot read" in refusal(capsys, "labels", photos, "--classes", tmp_path / "nowhere.txt")


def test_a_choice_that_leaves_no_label_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((6, 8, 8), np.uint8), y=np.array([0, 1, 0, 1, -1, -1]))
    (tmp_path / "files.txt").write_text("x/4\nx/5\n")
    assert "label" in refusal(capsys, "labels", tmp_path / "a.npz", "--subset", tmp_path / "files.txt")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--share", "2"], "2.0 is out of range"),
        (["--share", "0"], "0.0 is out of range"),
        (["--share", "half"], "half; expected"),
        (["--noise", "1.5"], "1.5 is out of range"),
        (["--per-class", "-3"], "-3 is out of range"),
        (["--per-class", "2.5"], "2.5; expected"),
        (["--seed", "x"], "x; expected"),
        (["--labels", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--coarse", "nowhere.csv"], "cannot read nowhere.csv"),
        (["--classes", "imagenet-100"], "none of the 100 classes of imagenet-100 is among cat, dog, fox"),
        (["--subset", "simclr-1"], "none of the 12811 files of simclr-1 is among the 30 images"),
    ],
)
def test_a_mistake_is_named(
    flags: list[str], message: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(capsys, "labels", photos, *flags, "--out", tmp_path / "x.csv")
    assert message in said
    assert not (tmp_path / "x.csv").exists()


@pytest.mark.parametrize(("flag", "value"), [("--share", "2"), ("--per-class", "-3"), ("--noise", "1.5")])
def test_a_mistake_is_named_by_the_flag_that_was_given(
    flag: str, value: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{flag} {value}" in refusal(capsys, "labels", photos, f"{flag}={value}")


def test_a_source_without_labels_has_none_to_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "pile" / "a.png")
    assert "pile has no labels to make a list from; give one with --labels" in refusal(
        capsys, "labels", tmp_path / "pile"
    )
    (tmp_path / "list.csv").write_text("path,label\na.png,cat\n")
    said = run(capsys, "labels", tmp_path / "pile", "--labels", tmp_path / "list.csv")
    assert "1 of 1 training images labelled" in said


def test_a_list_is_written_as_csv_alone(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "x.parquet"
    assert main(["labels", str(photos), "--out", str(out)]) == 2
    assert "expected a .csv file" in capsys.readouterr().err
    assert not out.exists()


def test_a_list_of_linked_images_serves_as_labels(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(3):
        put(tmp_path / "elsewhere" / f"{i}.png", 200 + i)
    (photos / "wolf").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    run(capsys, "labels", photos, "--out", tmp_path / "x.csv")
    assert len(as_source(tmp_path / "x.csv")) == 33
    assert as_labels(photos, tmp_path / "x.csv") == as_source(tmp_path / "x.csv")
