"""What hostile files once did, each as a claim that they do it no more."""

import csv
import io
import json
import os
import shutil
import signal
import struct
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import write_npz
from PIL import Image
from runs import TINY, StopAt

import cmsf
from cmsf.cli import main
from cmsf.cli.comparison import Comparison
from cmsf.data import open_source
from cmsf.data.images import Unreadable
from cmsf.data.sources.table import read_columns, read_table
from cmsf.data.sources.tar_index import RandomAccessFile, scan_tar
from cmsf.evaluation.transfer.datasets import read_suite
from cmsf.evaluation.transfer.tune import make_tuner
from cmsf.models.weights import load_pretrained
from cmsf.recipes.recipe import Recipe
from cmsf.runs.folder import RunFolder
from cmsf.runs.log import AppendOnlyFile
from cmsf.training.signals import Stopped
from cmsf.utils.errors import BadInput
from cmsf.utils.files import write_text
from cmsf.utils.screen import Screen

SMALL = "small-residual"


def put(file: Path, colour: int = 0) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (colour, 0, 0)).save(file, format="PNG")
    return file


# YAML


def test_a_few_lines_of_aliases_are_refused_before_they_are_written_out(tmp_path: Path) -> None:
    lines = ["a: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    file = tmp_path / "laughs.yaml"
    file.write_text("\n".join([*lines, "k: *a29"]))
    for read in (Recipe.read, read_suite):
        with pytest.raises(BadInput, match="aliases are not supported; write the value out in line 2"):
            read(file)


@pytest.mark.parametrize(
    "value",
    ["0x" + "f" * 6_000, "!!int ''", "!!float ''", "!!bool x", "!!timestamp x", "[" * 5_000, "2001-99-99", '"\\ud800"'],
)
def test_what_yaml_stumbles_over_is_refused(value: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(f"k: {value}\n")
    for read in (Recipe.read, read_suite):
        with pytest.raises(BadInput):
            read(file)


def test_a_pipe_or_a_device_is_no_recipe(tmp_path: Path) -> None:
    pipe, device = tmp_path / "pipe.yaml", tmp_path / "device.yaml"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for file in (pipe, device):
        with pytest.raises(BadInput, match="not a regular file"):
            Recipe.read(file)


def test_a_suite_runs_no_command(tmp_path: Path) -> None:
    file = tmp_path / "sets.yaml"
    file.write_text(f"birds: 'wds:pipe:touch {tmp_path}/canary'\n")
    with pytest.raises(BadInput, match="is a shell command"):
        read_suite(file)


def test_names_that_yaml_takes_for_one_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "sets.yaml"
    file.write_text("1: a\n0x1: b\n")
    with pytest.raises(BadInput, match="2 names that YAML takes for 1"):
        read_suite(file)


@pytest.mark.parametrize("name", ["../../../evil", "/tmp/evil", "a/b", "..", "x" * 400, "a\nb"])
def test_the_journal_of_a_search_stays_in_its_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(sys.modules["cmsf.evaluation.transfer.tune"], "tune", lambda *given: asked.append(given[3]))
    tuner = make_tuner(tmp_path, trials=1, processes=1, seed=0, storage=None, ray=False)
    tuner(None, f"{name}-0123456789abcdef", lambda finished, best: None)
    (journal,) = asked
    assert journal.resolve().parent == tmp_path.resolve()
    assert len(journal.name) < 100


# Lists


def test_a_class_of_five_thousand_digits_is_a_name(tmp_path: Path) -> None:
    file = tmp_path / "list.csv"
    put(tmp_path / "a.png")
    file.write_text(f"path,label\na.png,{'9' * 5_000}\n")
    assert open_source(file).classes == ("9" * 5_000,)
    file.write_text(f"index,label\n{'9' * 5_000},a\n")
    with pytest.raises(BadInput, match="are for images that are not there"):
        main_or_raise("labels", "--labels", file)


def main_or_raise(*arguments: object) -> None:
    from cmsf.cli import run_command

    run_command([str(one) for one in arguments])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_column_that_is_there_twice_is_refused(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"list.{suffix}"
    if suffix == "csv":
        file.write_text("path,label,label\na.png,x,y\n")
    else:
        pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["path", "path"]), file)
    with pytest.raises(BadInput, match=r"has the column '\w+' twice"):
        read_table(file)


def test_a_small_parquet_file_of_endless_text_is_refused(tmp_path: Path) -> None:
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(3_000, np.int8)), pa.array(["x" * 300_000]))
    file = tmp_path / "list.parquet"
    pq.write_table(pa.table({"path": column}), file, compression="zstd")
    assert file.stat().st_size < 100_000
    with pytest.raises(BadInput, match="a text of 300,000 bytes"):
        read_columns(file)


def test_more_rows_than_memory_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "list.parquet"
    pq.write_table(pa.table({"path": ["a"] * 1_000}), file)
    monkeypatch.setattr("cmsf.data.sources.table.available_memory", lambda: 1_600)
    with pytest.raises(BadInput, match="has 1,000 rows, and memory has room for 10"):
        read_columns(file)


# Images


def test_a_pipe_among_photos_is_a_broken_image_and_not_waited_for(tmp_path: Path) -> None:
    put(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    with pytest.raises(Unreadable, match="not a plain file"):
        open_source(tmp_path).train.images.size(1)


def test_postscript_is_no_image_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would start Ghostscript with it."""
    (tmp_path / "a.jpg").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n")
    with Image.open(tmp_path / "a.jpg") as image:
        assert image.format == "EPS"
    with pytest.raises(Unreadable, match="not an image, or of an unknown kind"):
        open_source(tmp_path).train.images.decode(0, 8)


# Arrays and weights


def test_an_array_that_is_said_to_be_larger_than_it_is_takes_no_memory(tmp_path: Path) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (2**40, 1, 1)})
    file = tmp_path / "x.npz"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", head.getvalue())
    with pytest.raises(BadInput, match=r"x is said to be of 1,099,511,627,776 bytes and has \d+"):
        open_source(file)


def test_arrays_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "x.npz", x=np.zeros((100, 8, 8), np.uint8))
    monkeypatch.setattr("cmsf.data.sources.npz.available_memory", lambda: 1_000)
    with pytest.raises(BadInput, match="its arrays take 6,400 bytes, and there are 1,000 of memory"):
        open_source(tmp_path / "x.npz")


def test_weights_that_repeat_one_number_without_end_are_refused(tmp_path: Path) -> None:
    torch.save({"stem.0.weight": torch.zeros(1).expand(2**40)}, tmp_path / "w.pt")
    with pytest.raises(BadInput, match="is not a state dict"):
        load_pretrained(str(tmp_path / "w.pt"), SMALL, 16)


def test_weights_that_were_packed_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    made, file = io.BytesIO(), tmp_path / "w.pt"
    torch.save({"a": torch.zeros(2_000_000)}, made)
    with zipfile.ZipFile(made) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            new.writestr(item.filename, old.read(item))
    with pytest.raises(BadInput, match=r"bytes would become 8,0"):
        load_pretrained(str(file), SMALL, 16)


def test_a_tar_archive_of_weights_is_not_unpacked_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda *given, **options: pytest.fail("unpacked"))
    with tarfile.open(tmp_path / "w.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("sys_info"))
    with pytest.raises(BadInput, match="not what torch writes"):
        load_pretrained(str(tmp_path / "w.tar"), SMALL, 16)
    (tmp_path / "w.pt").write_bytes(_called_as_a_pickle((tmp_path / "w.tar").read_bytes()))
    with pytest.raises(BadInput, match="it is a tar archive"):
        load_pretrained(str(tmp_path / "w.pt"), SMALL, 16)


def _called_as_a_pickle(archive: bytes) -> bytes:
    """The same archive, its first member's name beginning as pickles do."""
    block = bytearray(archive[:512])
    block[0], block[148:156] = 0x80, b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + archive[512:]


# Runs


@pytest.mark.parametrize(
    "environment", ['{"data": "x", "val": 3}', '{"data": "x", "labels": []}', "[" * 100_000, '{"data": 1}', "[]"]
)
def test_an_environment_that_cmsf_did_not_write_is_refused(environment: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.environment_file.write_text(environment)
    with pytest.raises(BadInput, match=r"not what cmsf train wrote|cannot read"):
        folder.data_config()


def test_a_listing_that_cmsf_did_not_write_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    good = {"path": ["a"], "index": [0], "label": ["x"], "truth": ["x"], "split": ["train"]}
    for name, column in (("split", None), ("path", [1]), ("index", ["a"]), ("label", [[1]])):
        changed = {key: value for key, value in (good | {name: column}).items() if value is not None}
        pq.write_table(pa.table(changed), folder.data_file)
        with pytest.raises(BadInput, match="not what cmsf train wrote"):
            folder.listing()
    folder.broken_file.write_text("path\na\n")
    with pytest.raises(BadInput, match="not what cmsf train wrote"):
        folder.known_broken()


def entries(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped with checkpoints."""
    place = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stopped):
        cmsf.train(
            "msf-small", write_npz(place / "x.npz"), place / "run", screen=StopAt(6, signal.SIGTERM), workers=0, **TINY
        )
    return place / "run"


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints", "tensorboard", "results", "recipe.yaml"])
def test_a_run_that_leads_elsewhere_by_a_link_is_not_resumed_and_nothing_there_changes(
    name: str, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(stopped, run)
    elsewhere.mkdir()
    if (run / name).exists():
        (run / name).rename(elsewhere / name)
    else:
        (elsewhere / name).mkdir()
    (elsewhere / "step-00000001-state.pt").write_bytes(b"somebody's")
    (run / name).symlink_to(elsewhere / name)
    before = entries(tmp_path)
    assert main(["train", "--resume", str(run), "--workers", "0"]) == 2
    assert f"{name} is a symlink" in capsys.readouterr().err
    assert entries(tmp_path) == before


def test_a_run_that_is_reached_by_a_link_is_resumed(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "link"), "--workers", "0", "--quiet"]) == 0
    assert RunFolder(tmp_path / "run").is_complete()
    for name in ("features", "results"):
        elsewhere = tmp_path / f"elsewhere-{name}"
        elsewhere.mkdir()
        (tmp_path / "run" / name).symlink_to(elsewhere)
        assert main(["evaluate", str(tmp_path / "link"), "--workers", "0"]) == 2
        assert not list(elsewhere.iterdir())
        (tmp_path / "run" / name).unlink()


def test_what_is_appended_to_or_written_beside_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("log", f".file.{os.getpid()}.part"):
        (tmp_path / name).symlink_to(tmp_path / "precious")
    with pytest.raises(BadInput, match="log is a symlink"):
        AppendOnlyFile(tmp_path / "log", 0)
    write_text(tmp_path / "file", "new")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="not a regular file"):
        AppendOnlyFile(tmp_path / "pipe")
    assert (tmp_path / "precious").read_text() == "precious"


# Shards


def _tar(*members: tarfile.TarInfo) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b"x" * member.size))
    return made.getvalue()


@pytest.mark.parametrize(
    "size", [b"77777777777\0", b"\xff" * 12, b"\xff" * 10 + b"\xfc\0", b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7]
)
def test_a_member_with_an_impossible_size_is_refused_and_not_gone_round_in(size: bytes, tmp_path: Path) -> None:
    content = bytearray(_tar(tarfile.TarInfo("a.cls")))
    content[124:136], content[148:156] = size, b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    file = tmp_path / "a.tar"
    file.write_bytes(content)
    with pytest.raises((tarfile.TarError, OSError)):
        scan_tar(RandomAccessFile(file))


def test_a_long_extended_header_is_refused_for_tarfile_takes_the_square_of_its_length(tmp_path: Path) -> None:
    member = tarfile.TarInfo("a.png")
    member.pax_headers = {"comment": "9" * 300_000}
    file = tmp_path / "a.tar"
    file.write_bytes(_tar(member))
    with pytest.raises(tarfile.TarError, match="impossible size"):
        scan_tar(RandomAccessFile(file))


def test_names_in_a_shard_that_are_no_utf_8_are_read_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMSF_CACHE", str(tmp_path / "cache"))
    image = put(tmp_path / "x.png").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in ((os.fsdecode(b"\xff.png"), image), (os.fsdecode(b"\xff.json"), b'{"label": "\\ud800"}')):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    source = open_source(f"wds:{tmp_path / 'a.tar'}")
    assert list(source.train.images.paths) == ["a/\\xff.png"]
    assert source.train.names == ["?"]


# What is shown


EVIL = ("\x1b[2J", "a\nb", "\u202ex", "[/red]", "$x$", "<script>", ":smile:")


def test_names_from_data_steer_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(EVIL):
        put(tmp_path / "photos" / name.replace("/", "-") / f"{name.replace('/', '-')}{number}.png", number)
    (tmp_path / "photos" / EVIL[0] / "broken\x1b[2J.png").write_bytes(b"x")
    assert main(["data", str(tmp_path / "photos"), "--out", str(tmp_path / "s\x1b.png")]) == 0
    assert main(["labels", str(tmp_path / "photos"), "--out", str(tmp_path / "list.csv")]) == 0
    assert main(["data", str(tmp_path / "\x1b[2J\n")]) == 2
    assert main(["data", "~nobody-is-called-so/photos"]) == 2
    Screen().print("".join(EVIL))
    printed = capfd.readouterr()
    for text in (printed.out, printed.err):
        assert not set(text) & set("\x1b\u202e\r")
    assert "\\x1b[2J" in printed.out
    assert ":smile:" in printed.err
    with (tmp_path / "list.csv").open(encoding="utf-8", newline="") as stream:
        listed = list(csv.reader(stream, strict=True))
    assert {row[1] for row in listed[1:]} == {name.replace("/", "-") for name in EVIL}


def test_names_are_no_markup_in_any_table(capsys: pytest.CaptureFixture[str]) -> None:
    found = Comparison("on [/red] <b> \x1b[2J")
    figure = {"quoted": "accuracy", "accuracy": {"value": 1.0, "low": 0.0, "high": 2.0}}
    for name in ("[/red]", "a\\|b", "<script>", "\x1b[2J", "$x$", "a\nb", "*"):
        found.add(name, {"knn": figure})
    markdown, latex = found.markdown(), found.latex()
    assert "| \\[/red\\] |" in markdown
    assert "| a\\\\\\|b |" in markdown
    assert "<" not in markdown
    assert "\n{}[/red] &" in latex
    assert "\n{}* &" in latex
    assert r"a\textbackslash{}nb &" in latex
    found.show("table")
    printed = capsys.readouterr().out
    assert "[/red]" in printed
    assert "\x1b" not in markdown + latex + printed


def test_a_message_is_a_line_of_bearable_length_with_the_remedy_at_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "cmsf-self", "--epochs", "9" * 5_000 + "\x1b[2J\n"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) < 320
    assert error.endswith("expected a whole number\n")
    assert main(["train", "cmsf-self", "--workers", "9" * 5_000]) == 2


def test_heads_that_no_memory_holds_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((40, 16, 16), np.uint8))
    wide = ["--projection-hidden", "65536", "--projection-layers", "8", "--projection-dim", "65536"]
    assert main(["train", "msf-small", "--data", str(tmp_path / "x.npz"), "--out", str(tmp_path / "run"), *wide]) == 2
    assert "GB of memory" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_json_can_spell_half_a_letter_and_a_classifier_cannot(tmp_path: Path) -> None:
    from cmsf.runs.folder import _is_class_name

    assert _is_class_name("犬")
    assert not _is_class_name(json.loads('"\\ud800"'))
    assert not _is_class_name(struct)
