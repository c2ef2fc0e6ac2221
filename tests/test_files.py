from pathlib import Path

import pytest

from cmsf.utils.files import atomic_write, write_text


def test_a_file_is_there_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "kept.txt"
    write_text(path, "old")

    def fail_in_the_middle() -> None:
        with atomic_write(path) as temporary:
            temporary.write_text("half of the ne")
            assert path.read_text() == "old"
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail_in_the_middle()
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["kept.txt"]
    write_text(path, "new")
    assert path.read_text() == "new"
