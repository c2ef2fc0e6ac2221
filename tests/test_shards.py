import functools
import http.server
import io
import json
import multiprocessing
import os
import pickle
import sys
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from cmsf.data.images import Images, Unreadable
from cmsf.data.sampling import epoch_order
from cmsf.data.sources.shards import open_shards
from cmsf.utils.errors import BadInput

webdataset = pytest.importorskip("webdataset")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMSF_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CMSF_SHARD_CACHE_GB", raising=False)
    monkeypatch.setenv("no_proxy", "*")


def _png(red: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (9, 7), (red, 1, 2)).save(stream, "PNG")
    return stream.getvalue()


def _write(file: Path, members: list[tuple[str, bytes]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as archive:
        for name, content in members:
            information = tarfile.TarInfo(name)
            information.size = len(content)
            archive.addfile(information, io.BytesIO(content))
    return file


def _write_shards(folder: Path, shards: int, each: int, prefix: str = "photos") -> str:
    """Shards whose images count up in red; image i is of class i % 3."""
    for number in range(shards):
        members = []
        for i in range(number * each, (number + 1) * each):
            members += [(f"{i:05d}.png", _png(i)), (f"{i:05d}.cls", str(i % 3).encode())]
        _write(folder / f"{prefix}-{number:03d}.tar", members)
    return f"{folder}/{prefix}-{{000..{shards - 1:03d}}}.tar"


def _red(image: Image.Image) -> int:
    pixel = image.getpixel((0, 0))
    assert isinstance(pixel, tuple)
    return int(pixel[0])


def _reds(images: Images) -> list[int]:
    return [_red(images.open(i)) for i in range(len(images))]


class Server:
    """Files over HTTP, and what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(http.server.SimpleHTTPRequestHandler):
            def log_message(self, format: str, *arguments: object) -> None:
                if self.command == "GET":
                    asked.append(self.path)

        handler = functools.partial(Handler, directory=str(folder))
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "web").mkdir()
    running = Server(tmp_path / "web")
    yield running
    running.server.shutdown()
    running.server.server_close()


def _copies(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "shards").glob("*/shard.tar"))


def test_any_image_of_any_shard_can_be_read(tmp_path: Path) -> None:
    source = open_shards(_write_shards(tmp_path, shards=3, each=4))
    images = source.train.images
    assert (source.name, list(source.splits), len(images)) == ("photos", ["train"], 12)
    for i in (11, 0, 5, 5, 8):
        assert _red(images.open(i)) == i
    assert source.train.names == [str(i % 3) for i in range(12)]
    assert source.classes == ("0", "1", "2")
    assert images.paths[5] == "photos-001/00005.png"
    assert images.blocks is None
    assert images.decode(7, 4).shape == (3, 7, 9)
    assert not source.notes


def test_the_bytes_are_those_that_webdataset_wrote(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    pictures = generator.integers(256, size=(5, 20, 30, 3), dtype=np.uint8)
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for i, picture in enumerate(pictures):
            writer.write({"__key__": f"folder.v1/猫 {i}", "png": picture, "cls": i, "json": {"label": "not this"}})
    source = open_shards(str(tmp_path / "a.tar"))
    for i, picture in enumerate(pictures):
        assert np.array_equal(np.asarray(source.train.images.open(i)), picture)
    assert source.train.images.paths[2] == "a/folder.v1/猫 2.png"
    assert source.train.names == ["0", "1", "2", "3", "4"]


def test_order_is_that_of_the_shards_given_and_of_their_members(tmp_path: Path) -> None:
    _write(tmp_path / "b.tar", [("z.png", _png(1)), ("a.png", _png(2))])
    _write(tmp_path / "a.tar", [("m.png", _png(3))])
    source = open_shards(f"{tmp_path}/b.tar::file:{tmp_path}/a.tar")
    assert _reds(source.train.images) == [1, 2, 3]
    assert list(source.train.images.paths) == ["b/z.png", "b/a.png", "a/m.png"]


def test_labels_are_names_or_numbers_or_none(tmp_path: Path) -> None:
    rows = [
        ("cls", "Straße\n".encode(), "Straße"),
        ("cls", b"-1", None),
        ("cls", b"", None),
        ("json", b'{"label": 3, "class_name": "\\u732b"}', "猫"),
        ("json", b'{"label": 3}', "3"),
        ("json", b'{"label": -1}', None),
        ("json", b'{"label": true, "caption": "a"}', None),
        ("json", b"[1", None),
        ("txt", b"a caption", None),
    ]
    members = []
    for i, (ending, content, _) in enumerate(rows):
        members += [(f"{i}.{ending}", content), (f"{i}.png", _png(i))]
    source = open_shards(str(_write(tmp_path / "a.tar", members)))
    assert source.train.names == [label for _, _, label in rows]
    assert _reds(source.train.images) == list(range(len(rows)))


def test_samples_without_an_image_and_with_several_are_counted(tmp_path: Path) -> None:
    members = [
        ("a.png", _png(1)),
        ("a.mask.png", _png(2)),
        ("b.txt", b"no image"),
        ("c.JPG", _png(3)),
        ("d/._e.png", b"what another system left"),
    ]
    source = open_shards(str(_write(tmp_path / "a.tar", members)))
    assert list(source.train.images.paths) == ["a/a.png", "a/c.JPG"]
    assert "1 samples have no image" in source.notes[0]
    assert "1 further images" in source.notes[1]


def test_a_key_that_repeats_keeps_names_unique(tmp_path: Path) -> None:
    members = [("a.png", _png(1)), ("a.png", _png(2)), ("b.png", _png(3)), ("a.png", _png(4))]
    _write(tmp_path / "x" / "s.tar", members)
    _write(tmp_path / "y" / "s.tar", members[:1])
    source = open_shards(f"{tmp_path}/{{x,y}}/s.tar")
    assert list(source.train.images.paths) == ["s/a.png", "s/a.png#2", "s/b.png", "s/a.png#3", "s/a.png#4"]
    assert _reds(source.train.images) == [1, 2, 3, 4, 1]


def test_names_of_shards_say_the_split(tmp_path: Path) -> None:
    both = "::".join(_write_shards(tmp_path, 2, 2, prefix) for prefix in ("set-train", "set-val"))
    source = open_shards(both)
    assert {part: len(images) for part, images in source.splits.items()} == {"train": 4, "val": 4}
    assert source.splits["val"].images.paths[3] == "set-val-001/00003.png"
    assert _reds(source.splits["val"].images) == [0, 1, 2, 3]
    alone = open_shards(_write_shards(tmp_path, 2, 2, "set-val"))
    assert list(alone.splits) == ["train"]
    folders = open_shards("::".join(_write_shards(tmp_path / name, 1, 2) for name in ("train", "test")))
    assert list(folders.splits) == ["train", "test"]
    capitals = open_shards("::".join(_write_shards(tmp_path / "cased" / name, 1, 2) for name in ("Train", "TEST")))
    assert list(capitals.splits) == ["train", "test"]
    latest = open_shards(_write_shards(tmp_path, 1, 2, "contest") + "::" + _write_shards(tmp_path, 1, 2, "trains"))
    assert list(latest.splits) == ["train"]


def test_the_second_start_goes_through_no_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = _write_shards(tmp_path, 2, 3)
    first = open_shards(name)
    with monkeypatch.context() as patched:
        patched.setattr("cmsf.data.sources.shards.scan_tar", None)
        again = open_shards(name)
    assert (again.train.names, list(again.train.images.paths)) == (first.train.names, list(first.train.images.paths))
    assert _reds(again.train.images) == [0, 1, 2, 3, 4, 5]
    _write(tmp_path / "photos-001.tar", [("new.png", _png(77))])
    assert _reds(open_shards(name).train.images) == [0, 1, 2, 77]


@pytest.mark.parametrize("keep", [700, 1024, 2000, -1024])
def test_a_shard_that_breaks_off_is_named(tmp_path: Path, keep: int) -> None:
    name = _write_shards(tmp_path, 3, 2)
    shard = tmp_path / "photos-001.tar"
    with tarfile.open(shard) as archive:
        end = archive.getmembers()[-1].offset_data + 512
    content = shard.read_bytes()[:end]  # without the blocks that say it is the end
    shard.write_bytes(content[:keep])
    with pytest.raises(BadInput, match=r"cannot read shard .*photos-001\.tar: ") as error:
        open_shards(name)
    assert "\n" not in str(error.value)


def test_what_cannot_be_opened_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_shards(tmp_path, 2, 1)
    with pytest.raises(BadInput, match=r"3 of 5 shards are not there; the first is .*photos-002\.tar"):
        open_shards(f"{tmp_path}/photos-{{000..004}}.tar")
    with pytest.raises(BadInput, match="cannot parse"):
        open_shards(f"{tmp_path}/${{NOWHERE}}.tar")
    _write(tmp_path / "text.tar", [("a.txt", b"a")])
    with pytest.raises(BadInput, match="no images in the 1 shards"):
        open_shards(f"{tmp_path}/text.tar")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "photos-000.tar", "a.png")
    with pytest.raises(BadInput, match=r"cannot read shard .*a\.tar\.gz: it is compressed"):
        open_shards(f"{tmp_path}/a.tar.gz")
    unpacked = open_shards(f"pipe:gunzip -c {tmp_path}/a.tar.gz")
    assert list(unpacked.train.images.paths) == ["a/a.png"]
    with pytest.raises(BadInput, match="cannot read shard nonsense://a"):
        open_shards("nonsense://a.tar")
    monkeypatch.setenv("CMSF_SHARD_CACHE_GB", "much")
    with pytest.raises(BadInput, match="CMSF_SHARD_CACHE_GB is 'much'"):
        open_shards(f"{tmp_path}/photos-000.tar")
    monkeypatch.setitem(sys.modules, "webdataset.shardlists", None)
    with pytest.raises(BadInput, match=r"pip install 'cmsf\[wds\]'"):
        open_shards(f"{tmp_path}/photos-000.tar")


def test_shards_on_the_web_are_copied_once(tmp_path: Path, server: Server) -> None:
    _write_shards(tmp_path / "web", 3, 4)
    url = f"{server.url}/photos-{{000..002}}.tar"
    source = open_shards(url)
    images = source.train.images
    assert images.paths[5] == "photos-001/00005.png"
    assert images.blocks is not None
    assert images.blocks.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert _reds(images) == list(range(12))
    assert _reds(open_shards(url).train.images) == list(range(12))
    assert sorted(server.asked) == [f"/photos-00{i}.tar" for i in range(3)]
    assert len(_copies(tmp_path)) == 3


def test_blocks_of_a_part_count_its_own_shards(tmp_path: Path) -> None:
    for prefix in ("set-val", "set-train"):
        _write_shards(tmp_path, 2, 3, prefix)
    source = open_shards(f"pipe:cat {tmp_path}/set-{{val,train}}-{{000,001}}.tar")
    for part in ("train", "val"):
        blocks = source.splits[part].images.blocks
        assert blocks is not None
        assert blocks.tolist() == [0, 0, 0, 1, 1, 1]
        assert sorted(epoch_order(blocks, 6, seed=0, epoch=0).tolist()) == list(range(6))
    assert source.train.images.paths[0] == "set-train-000/00000.png"
    assert _reds(source.train.images) == list(range(6))


def test_the_cache_keeps_its_bound_and_fetches_again(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_shards(tmp_path / "web", 5, 4)
    size = (tmp_path / "web" / "photos-000.tar").stat().st_size
    monkeypatch.setenv("CMSF_SHARD_CACHE_GB", str(2.5 * size / 1e9))
    images = open_shards(f"{server.url}/photos-{{000..004}}.tar").train.images
    assert len(_copies(tmp_path)) == 2
    assert _reds(images) == list(range(20))
    assert len(_copies(tmp_path)) == 2
    assert len(server.asked) > 5
    before = len(server.asked)
    assert _reds(images) == list(range(20))  # open files that were removed can still be read
    assert len(server.asked) == before


def test_the_copy_that_was_opened_longest_ago_goes_first(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_shards(tmp_path / "web", 3, 4)
    size = (tmp_path / "web" / "photos-000.tar").stat().st_size
    monkeypatch.setenv("CMSF_SHARD_CACHE_GB", str(2.5 * size / 1e9))
    open_shards(f"{server.url}/photos-{{000,001}}.tar")
    for copy in _copies(tmp_path):
        age = 1000 if copy.read_bytes() == (tmp_path / "web" / "photos-000.tar").read_bytes() else 2000
        os.utime(copy, (age, age))
    images = open_shards(f"{server.url}/photos-{{000,001}}.tar").train.images
    _red(images.open(0))  # shard 0 is the newest now
    open_shards(f"{server.url}/photos-002.tar")
    server.asked.clear()
    again = open_shards(f"{server.url}/photos-{{000,001}}.tar").train.images
    assert _red(again.open(0)) == 0
    assert not server.asked
    assert _red(again.open(4)) == 4
    assert server.asked == ["/photos-001.tar"]


def test_a_shard_that_is_not_on_the_web_is_named(tmp_path: Path, server: Server) -> None:
    _write_shards(tmp_path / "web", 1, 1)
    with pytest.raises(BadInput, match=r"cannot read shard .*photos-001\.tar") as error:
        open_shards(f"{server.url}/photos-{{000,001}}.tar")
    assert "\n" not in str(error.value)
    with pytest.raises(BadInput, match="cannot read shard pipe:cat"):
        open_shards(f"pipe:cat {tmp_path}/nowhere.tar 2>/dev/null")
    assert len(_copies(tmp_path)) == 1


def test_a_shard_on_the_web_that_has_changed_is_not_misread(tmp_path: Path, server: Server) -> None:
    _write_shards(tmp_path / "web", 1, 4)
    images = open_shards(f"{server.url}/photos-000.tar").train.images
    _copies(tmp_path)[0].unlink()
    _write_shards(tmp_path / "web", 1, 40)
    with pytest.raises(Unreadable, match=r"photos-000/00002\.png: .* bytes and had"):
        images.decode(2, 4)
    assert len(open_shards(f"{server.url}/photos-000.tar").train) == 40


def test_images_survive_pickling_with_files_open(tmp_path: Path) -> None:
    images = open_shards(_write_shards(tmp_path, 2, 3)).train.images
    assert _red(images.open(4)) == 4
    copy = pickle.loads(pickle.dumps(images))
    assert _reds(copy) == list(range(6))
    assert _reds(copy.subset(torch.tensor([5, 0]))) == [5, 0]


def test_more_shards_than_open_files_and_many_threads(tmp_path: Path) -> None:
    images = open_shards(_write_shards(tmp_path, 40, 2)).train.images
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0)).tolist() * 5
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda i: _red(images.open(i)), order)) == order


class _Reds(torch.utils.data.Dataset[int]):
    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> int:
        return _red(self.images.open(i))


def test_two_processes_read_from_one_small_cache(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_shards(tmp_path / "web", 6, 5)
    size = (tmp_path / "web" / "photos-000.tar").stat().st_size
    monkeypatch.setenv("CMSF_SHARD_CACHE_GB", str(1.5 * size / 1e9))
    images = open_shards(f"{server.url}/photos-{{000..005}}.tar").train.images
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()
    context = multiprocessing.get_context("fork")
    loader = DataLoader(_Reds(images), batch_size=3, sampler=order, num_workers=2, multiprocessing_context=context)
    assert torch.cat(list(loader)).tolist() == order
    assert len(_copies(tmp_path)) <= 2


def test_the_index_is_text_that_says_where_images_lie(tmp_path: Path) -> None:
    open_shards(_write_shards(tmp_path, 1, 2))
    (file,) = (tmp_path / "cache" / "shards").glob("*/index.json")
    index = json.loads(file.read_text())["index"]
    content = (tmp_path / "photos-000.tar").read_bytes()
    for i, (offset, size) in enumerate(zip(index["offsets"], index["sizes"], strict=True)):
        assert content[offset : offset + size] == _png(i)


def test_local_shards_need_no_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CMSF_CACHE", str(tmp_path / "file"))
    assert _reds(open_shards(_write_shards(tmp_path, 1, 2)).train.images) == [0, 1]


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    name = _write_shards(tmp_path, 1, 2)
    open_shards(name)
    (file,) = (tmp_path / "cache" / "shards").glob("*/index.json")
    whole = file.read_text()
    for damaged in ("", "[]", '{"format": 0}', '{"format": 1, "index": {"odd": 1}}'):
        file.write_text(damaged)
        assert _reds(open_shards(name).train.images) == [0, 1]
        assert file.read_text() == whole
