"""What a run writes down of its data, to be found again from another folder."""

from pathlib import Path

import pytest

from cmsf.data import DataConfig, open_source
from cmsf.utils.errors import BadInput


def test_names_last_when_the_working_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "CIFAR10").mkdir()
    (tmp_path / "saved").mkdir()
    here = str(tmp_path)
    assert DataConfig.resolve("photos").data == f"{here}/photos"
    assert DataConfig.resolve("torchvision:CIFAR10").data == "torchvision:CIFAR10"  # whatever folder is called so
    assert DataConfig.resolve("torchvision:CIFAR10@sets@home").data == f"torchvision:CIFAR10@{here}/sets@home"
    assert DataConfig.resolve("hf:saved").data == f"hf:{here}/saved"
    assert DataConfig.resolve("hf:someone/something@small").data == "hf:someone/something@small"
    assert DataConfig.resolve("wds:a-{0..3}.tar::b.tar").data == f"wds:{here}/a-{{0..3}}.tar::{here}/b.tar"
    assert DataConfig.resolve("wds:https://example.org/a.tar").data == "wds:https://example.org/a.tar"
    assert DataConfig.resolve("a.csv", "labels.csv", "b").labels == f"{here}/labels.csv"


def test_a_linked_list_stays_where_it_was_named(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "list.csv").touch()
    (tmp_path / "list.csv").symlink_to(tmp_path / "elsewhere" / "list.csv")
    assert DataConfig.resolve(tmp_path / "list.csv").data == str(tmp_path / "list.csv")


@pytest.mark.parametrize("data", ["wds:pipe:cat a.tar", "wds:a.tar::pipe:cat b.tar", "wds:pip{e,e}:cat a.tar"])
def test_a_command_is_known_in_any_disguise(data: str) -> None:
    pytest.importorskip("webdataset")
    assert DataConfig(data).runs_command
    assert DataConfig("sample", val=data).runs_command
    assert not DataConfig("wds:a-{0..3}.tar").runs_command


def test_a_name_that_is_too_long_for_a_file_is_none_that_is_there() -> None:
    with pytest.raises(BadInput, match="no such file or folder: xxx"):
        open_source("x" * 300)
