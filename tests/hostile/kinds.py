"""The kinds of hostile files: each function fills a box by a seed and says what to do with it."""

from __future__ import annotations

import csv
import io
import json
import os
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
import torch

import cmsf
from cmsf.cli import run_command
from cmsf.evaluation.hashed import save_tensors
from cmsf.evaluation.transfer.datasets import read_suite
from cmsf.models.backbones import make_backbone
from cmsf.models.weights import load_pretrained
from cmsf.runs.embeddings import _KeptSplit
from hostile import canary, text
from hostile.judging import Box, Case
from hostile.mutations import mutated
from hostile.stock import Stock, copied, go_on

Maker = Callable[[Stock, Box, Random], Case]


def command(*arguments: str | Path) -> Callable[[], int]:
    return lambda: run_command([str(one) for one in arguments])


# Recipes


def _yaml(random: Random, box: Box) -> str:
    deep, wide = random.choice((50, 500, 20_000)), random.choice((9, 30))
    setting = random.choice(("name", "k", "epochs", "lr", "backbone", "init", "coarse_labels", "seed", "include_query"))
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, wide)
    )
    merges = "m0: &m0 {k: 5}\n" + "".join(
        f"m{i}: &m{i} {{<<: [{', '.join([f'*m{i - 1}'] * 9)}]}}\n" for i in range(1, wide)
    )
    quoted = json.dumps(text.name(random))
    return random.choice(
        (
            laughs + f"{setting}: *a{wide - 1}\n",
            merges,
            f"{setting}: &s [*s]\n",
            f"{setting}: {'[' * deep}{']' * deep}\n",
            f"{setting}: {'{a: ' * deep}1{'}' * deep}\n",
            "- " * deep + "x\n",
            canary.in_yaml(box.path),
            f"{setting}: !!python/name:os.system\n",
            f"{setting}: !!{random.choice(('int', 'float', 'bool', 'timestamp', 'binary', 'set', 'omap', 'pairs'))} "
            f"{random.choice(('', 'x', quoted, '[1, 2]', '{a: b}', '0x', '_', '+', '1:60:99'))}\n",
            f"{setting}: 0x{'f' * random.choice((20, 6_000))}\n",
            f"{setting}: {'9' * random.choice((20, 6_000))}\n",
            f"{setting}: {':'.join(['59'] * random.choice((5, 3_000)))}\n",
            f"{setting}: {random.choice(('.nan', '-.inf', '1e999', '-0.0', '~', '2001-01-01', '[1]', '{}'))}\n",
            f"{setting}: {quoted}\n",
            f"{quoted}: 1\n",
            f"? [{setting}]\n: 1\n",
            f"{setting}: 1\n{setting}: 2\n",
            f"---\n{setting}: 1\n---\n{setting}: 2\n",
            "%YAML 9.9\n---\nk: 1\n",
            "",
            "x" * random.choice((10, 3_000_000)),
            f"projection_hidden: 65536\nprojection_layers: 8\n{setting}: auto\n",
        )
    )


def recipe_file(stock: Stock, box: Box, random: Random) -> Case:
    whole = (stock.run / "recipe.yaml").read_bytes()
    if random.random() < 0.5:
        content: bytes | str = mutated(whole, random)
    elif random.random() < 0.15:
        content = random.choice(
            (b"\xff\xfe" + whole, b"name: \xff\xfe\n", whole + b"\0", whole.decode().encode("utf-16"))
        )
    else:
        content = (whole.decode() if random.random() < 0.3 else "") + _yaml(random, box)
    file = box.put("recipe.yaml", content)
    if random.random() < 0.03:
        file.unlink()
        random.choice((lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero"), file.mkdir))()
    return Case(command("recipes", file))


# Lists


def _table(random: Random) -> list[list[str]]:
    header = random.choice(
        (
            ["path", "label"],
            ["path", "label", "split"],
            ["index", "label"],
            ["path", "path", "label"],
            ["path", "label", "label"],
            ["label"],
            ["path"],
            [" PATH ", "Label"],
            [],
            [text.name(random), "label"],
            ["path", "index", "label"],
        )
    )
    photos = [f"class{number}/{place}.png" for place, number in enumerate((0, 0, 1, 1, 2, 2))]
    rows, hostility = [], random.choice((0.0, 0.05, 0.3))
    for place in range(random.choice((0, 1, 6, 6, 6))):
        row = []
        for column in header:
            plain = {"path": photos[place], "index": str(place), "split": "train"}.get(
                column.strip().lower(), f"c{place % 2}"
            )
            row.append(text.name(random) if random.random() < hostility else plain)
        rows.append(row if random.random() < 0.97 else row[:-1])
    return [header, *rows]


def _use_list(stock: Stock, box: Box, file: Path, random: Random) -> Case:
    if random.random() < 0.7:
        return Case(command("labels", stock.photos, "--labels", file, "--out", box.out / "list.csv"))
    for photo in stock.photos.glob("*/*"):
        box.put(str(photo.relative_to(stock.photos)), photo.read_bytes())
    return Case(command("data", file, "--out", box.out / "sheet.png"))


def csv_list(stock: Stock, box: Box, random: Random) -> Case:
    made = io.StringIO()
    writer = csv.writer(
        made, delimiter=random.choice(",;\t"), quoting=random.choice((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    )
    writer.writerows(_table(random))
    content = made.getvalue().encode("utf-8", "surrogatepass")
    if random.random() < 0.4:
        content = mutated(content, random)
    return _use_list(stock, box, box.put("list.csv", content), random)


def parquet_list(stock: Stock, box: Box, random: Random) -> Case:
    kind = random.randrange(8)
    count = 6
    paths: Any = [f"class{number}/{place}.png" for place, number in enumerate((0, 0, 1, 1, 2, 2))]
    labels: Any = [text.encodable(text.name(random)) if random.random() < 0.4 else "c" for _ in range(count)]
    if kind == 0:
        paths = [text.encodable(text.name(random)) for _ in range(count)]
    elif kind == 1:
        labels = random.choice(
            (
                pa.array([1.5, None, float("nan"), float("inf"), -0.0, 1e308]),
                pa.array([[1], [], None, [2], [3], [4]]),
                pa.array([b"\xff", b"", None, b"x", b"\0", b"y"]),
                pa.array([{"a": 1}] * count),
                pa.array([2**63 - 1, -(2**63), 0, 1, -1, None]),
                pa.array([2**62] * count, pa.timestamp("ns")),
                pa.array([2**52, -(2**52), 0, 1, 2, 3], pa.timestamp("s")),
                pa.array([2**62] * count, pa.duration("s")),
                pa.array([True, False, None, True, False, True]),
                pa.nulls(count),
                pa.array(["x"] * count).dictionary_encode(),
                pa.array([10**30] * count, pa.decimal128(38)),
            )
        )
    columns = [pa.array(paths), labels if isinstance(labels, pa.Array) else pa.array(labels)]
    names = random.choice((["path", "label"], ["path", "label"], ["path", "path"], ["index", "label"], ["a", "b"]))
    if kind == 2:  # an invalid letter in a column of text
        raw = pa.py_buffer(b"\xff" * count)
        columns[0] = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(struct.pack("<7i", *range(7))), raw])
    file = box.given / "list.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == 3:  # a few kilobytes that are a long list, or one of long names
        rows, length = random.choice(((20_000_000, 1), (3_000, 300_000)))
        column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int8)), pa.array(["x" * length]))
        pq.write_table(pa.table([column, column], names=["path", "label"]), file, compression="zstd")
    else:
        pq.write_table(pa.table(columns, names=names), file)
    if kind > 5:
        file.write_bytes(mutated(file.read_bytes(), random))
    return _use_list(stock, box, file, random)


def mapping_file(stock: Stock, box: Box, random: Random) -> Case:
    made = io.StringIO()
    rows = [["class", "group"], *([f"class{number}", "things"] for number in range(3))]
    for row in rows:
        for place in range(2):
            if random.random() < 0.2:
                row[place] = text.name(random)
    csv.writer(made).writerows(rows)
    content = made.getvalue().encode("utf-8", "surrogatepass")
    file = box.put("groups.csv", mutated(content, random) if random.random() < 0.4 else content)
    return Case(command("labels", stock.photos, "--coarse", file, "--out", box.out / "list.csv"))


def names_of_files(stock: Stock, box: Box, random: Random) -> Case:
    """Folders and files that are called anything."""
    for number in range(4):
        wanted = text.encodable(text.name(random)).replace("/", "⁄").replace("\0", "0")[:50]
        folder = box.given / (wanted if wanted not in ("", ".", "..") else "a")
        folder.mkdir(parents=True, exist_ok=True)
        ending = random.choice((".png", ".png", ".PNG", ".jpg", "", ".txt"))
        inside = text.encodable(text.name(random)).replace("/", "⁄").replace("\0", "0")[:50]
        (folder / f"{inside}{number}{ending}").write_bytes(stock.images["png"])
    if random.random() < 0.3:
        hidden = os.fsencode(box.given) + b"/\xff\xfe.png"
        Path(os.fsdecode(hidden)).write_bytes(stock.images["png"])
    if random.random() < 0.5:
        return Case(command("labels", box.given, "--out", box.out / "list.csv"))
    return Case(command("data", box.given, "--out", box.out / "sheet.png"))


# Images


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _png(width: int, height: int, *chunks: bytes, content: bytes = b"\0" * 4) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + b"".join(chunks)
        + _chunk(b"IDAT", zlib.compress(content))
        + _chunk(b"IEND", b"")
    )


def _made_image(stock: Stock, random: Random) -> bytes:
    bomb = zlib.compress(b"a" * 5_000_000, 1)
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("x.png", stock.images["png"])
    return random.choice(
        (
            lambda: _png(2**31 - 1, 2**31 - 1),
            lambda: _png(100_000, 100_000),
            lambda: _png(12_000, 12_000, content=b"\0" * (12_001 * 12_000)),
            lambda: _png(50_000_000, 1, content=b"\0" * 50_000_001),
            lambda: _png(1, 3_000_000, content=b"\0" * 6_000_000),
            lambda: _png(0, 0),
            lambda: _png(3, 0),
            lambda: _png(3, 1, _chunk(b"zTXt", b"Comment\0\0" + bomb)),
            lambda: _png(3, 1, _chunk(b"iCCP", b"icc\0\0" + bomb)),
            lambda: _png(3, 1, _chunk(b"iTXt", b"XML\0\1\0\0\0" + bomb)),
            lambda: _png(3, 1, _chunk(b"tEXt", b"\x1b[2J\0\x1b[31m")),
            lambda: _png(3, 1, _chunk(b"eXIf", b"II*\0" + b"\xff" * 400)),
            lambda: _png(3, 1, _chunk(b"\x1b[2J", b"x")),
            lambda: b"GIF89a" + b"\0\0\0\0" + b"\x80\0\0" + b"\0" * 6 + b";",
            lambda: b"GIF89a" + b"\xff" * 4 + b"\x80\0\0" + b"\0" * 6 + b"," + b"\0" * 4 + b"\xff" * 4 + b"\0\2\0;",
            lambda: b"P6\n99999 99999\n255\n" + b"x" * 99,
            lambda: b"P3\n3 1\n255\n" + b"9" * 100_000,
            lambda: b"P5\n0 0\n255\n",
            lambda: b"P4\n-1 -1\n",
            lambda: b"II*\0\x08\0\0\0\xff\xff" + b"\x00\x01\x04\x00\xff\xff\xff\xff\x08\0\0\0" * 40,
            lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n",
            lambda: b"%PDF-1.4\n%\xff\n",
            lambda: b"BM" + b"\xff" * 60,
            lambda: b"RIFF\xff\xff\xff\xffWEBPVP8X" + b"\xff" * 40,
            lambda: b"\0\0\0\x0cjP  \r\n\x87\n" + b"\xff" * 60,
            lambda: zipped.getvalue(),
            lambda: stock.shard,
            lambda: canary.in_a_pickle(Path("canary")),
            lambda: b"<svg xmlns='http://www.w3.org/2000/svg'><image href='http://127.0.0.1:9/'/></svg>",
            lambda: b"",
            lambda: b"\0" * 1_000,
        )
    )()


def image_file(stock: Stock, box: Box, random: Random) -> Case:
    kind = random.choice(list(stock.images))
    chosen = random.random()
    content = mutated(stock.images[kind], random) if chosen < 0.7 else _made_image(stock, random)
    ending = kind if random.random() < 0.7 else random.choice(("jpg", "png", "tif", "webp"))
    file = box.put(f"pile/a.{ {'jpeg2000': 'jp2', 'tiff': 'tif'}.get(ending, ending) }", content)
    if random.random() < 0.03:
        file.unlink()
        random.choice((lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero"), file.mkdir))()
    box.put("pile/b.png", stock.images["png"])
    return Case(command("data", box.given / "pile", "--out", box.out / "sheet.png"))


# Arrays


def _zip_bomb(name: str, shape: tuple[int, ...]) -> bytes:
    """An array of zeros, a thousand times as large as its file; its checksum is wrong, which nobody lives to see."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
    size = len(head.getvalue()) + int(np.prod(shape))
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = packer.compress(head.getvalue()) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(name, start + block * (size >> 20))
    content = bytearray(made.getvalue())
    central = content.rindex(b"PK\x01\x02")
    for place, method, length in ((0, 8, 22), (central, 10, 24)):
        content[place + method] = zipfile.ZIP_DEFLATED
        content[place + length : place + length + 4] = struct.pack("<I", size)
    return bytes(content)


def npz_file(stock: Stock, box: Box, random: Random) -> Case:
    file = box.given / "x.npz"
    file.parent.mkdir(parents=True, exist_ok=True)
    images, labels = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    kind = random.randrange(10)
    if kind < 4:
        file.write_bytes(mutated(stock.arrays.read_bytes(), random))
    elif kind == 4:
        file.write_bytes(random.choice((canary.in_an_npz, canary.in_an_array, canary.in_a_pickle))(box.path))
    elif kind == 5:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            made = io.BytesIO()
            np.lib.format.write_array(made, labels)
            archive.writestr("y.npy", made.getvalue())
            shape = random.choice(((2_000, 4, 4), (10**9, 32, 32), (2**40, 1, 1), (-1, 4, 4), (0, 4, 4)))
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
            archive.writestr("x.npy", head.getvalue() + b"\0" * random.choice((0, 10, 16_000_000)))
            archive.writestr("../../evil.npy", b"x")
    elif kind == 6:
        file.write_bytes(_zip_bomb("x.npy", (3_500, 1_000, 1_000)))
    else:
        y: Any = random.choice(
            (
                labels.astype(float),
                np.array([0, 1, np.nan] * 2),
                labels.astype(bool),
                labels.astype("U9"),
                labels[:3],
                np.array([-5] * 6),
                np.array([2**40] * 6),
                np.array([2**63] * 6, np.uint64),
                np.full(6, -1),
                labels[:, None],
                np.array(3),
                labels.astype(complex),
                labels.astype("M8[s]"),
                np.zeros(6, [("a", "i4")]),
            )
        )
        x: Any = random.choice(
            (
                images,
                images,
                images.astype(float),
                images[0],
                images[:0],
                images[:, :0],
                images[..., None],
                np.zeros((6, 4, 4, 2), np.uint8),
                np.zeros((6, 3, 4, 4), np.uint8),
                images.astype(">u2"),
                np.array(1),
                np.zeros((6, 1, 100_000), np.uint8),
                np.zeros((6, 4, 4), "S5"),
            )
        )
        names: Any = random.choice(
            (
                ["a", "b"],
                ["a"],
                [text.name(random), text.name(random)],
                [1, 2],
                [b"\xff", b"b"],
                [["a", "b"]],
                "a",
                [],
                ["same", "same"],
            )
        )
        arrays = {"x": x, "y": y} | ({"classes": np.array(names)} if random.random() < 0.5 else {})
        np.savez(
            file, **({f"{key}_train": value for key, value in arrays.items()} if random.random() < 0.2 else arrays)
        )
    action = random.choice(("labels", "data"))
    out = box.out / ("list.csv" if action == "labels" else "sheet.png")
    return Case(command(action, file, "--out", out))


# Weights


def _safetensors(header: Any, content: bytes = b"", length: int | None = None) -> bytes:
    text_ = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text_) if length is None else length) + text_ + content


def _weights(stock: Stock, box: Box, random: Random) -> tuple[str, bytes]:
    good = (stock.run / "backbone.safetensors").read_bytes()
    network = make_backbone("small-residual").state_dict()
    saved = io.BytesIO()
    name = random.choice(list(network))
    one = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}

    def torch_file(state: Any, **options: Any) -> bytes:
        torch.save(state, saved, **options)
        return saved.getvalue()

    def deflated() -> bytes:
        """What torch wrote, packed as hard as zip can: no program saves weights so."""
        torch.save({name: torch.zeros(10_000_000)}, saved)
        packed = io.BytesIO()
        with zipfile.ZipFile(saved) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
            for item in old.infolist():
                new.writestr(item.filename, old.read(item))
        return packed.getvalue()

    choices: tuple[tuple[str, Callable[[], bytes]], ...] = (
        ("safetensors", lambda: mutated(good, random)),
        ("safetensors", lambda: mutated(good, random)),
        ("safetensors", lambda: _safetensors({name: one}, b"\0" * 16)),
        ("safetensors", lambda: _safetensors({name: one | {"shape": [2**62, 4]}}, b"\0" * 16)),
        ("safetensors", lambda: _safetensors({name: one | {"data_offsets": [0, 2**60]}}, b"\0" * 16)),
        ("safetensors", lambda: _safetensors({name: one | {"data_offsets": [16, 0]}}, b"\0" * 16)),
        ("safetensors", lambda: _safetensors({name: one | {"dtype": "F4"}}, b"\0" * 16)),
        ("safetensors", lambda: _safetensors({text.encodable(text.name(random)): one}, b"\0" * 16)),
        ("safetensors", lambda: _safetensors({"__metadata__": {"a": 1}, name: one}, b"\0" * 16)),
        ("safetensors", lambda: _safetensors(b"[" * 50_000)),
        ("safetensors", lambda: _safetensors(b"{" + b'"a":{' * 10_000)),
        ("safetensors", lambda: _safetensors({}, length=2**63)),
        ("safetensors", lambda: _safetensors({}, length=10**8)),
        ("safetensors", lambda: safetensors.torch.save({k: v.long() for k, v in network.items()})),
        ("safetensors", lambda: safetensors.torch.save({k: v.to(torch.complex64) for k, v in network.items()})),
        ("safetensors", lambda: safetensors.torch.save({k: v * torch.nan for k, v in network.items()})),
        ("pt", lambda: mutated(torch_file(network), random)),
        ("pt", lambda: mutated(torch_file(network), random)),
        ("pt", lambda: mutated(torch_file(network, _use_new_zipfile_serialization=False), random)),
        ("pt", lambda: torch_file({name: torch.zeros(1).expand(2**40)})),
        ("pt", lambda: torch_file({name: torch.zeros(2**20).to_sparse()})),
        ("pt", lambda: torch_file({text.name(random): torch.zeros(3)})),
        ("pt", lambda: torch_file({"state_dict": {3: torch.zeros(3)}})),
        ("pt", lambda: torch_file({**network, name: "a string"})),
        ("pt", lambda: torch_file({**network, name: torch.zeros(7, 7)})),
        ("pt", deflated),
        ("pt", lambda: canary.in_a_torch_file(box.path)),
        ("pt", lambda: canary.in_a_pickle(box.path)),
        ("pth", lambda: stock.shard),
        ("tar", lambda: stock.shard),
        ("bin", lambda: b""),
        ("ckpt", lambda: b"\x80\x02]q\0" * 1_000),
    )
    suffix, make = random.choice(choices)
    return suffix, make()


def weight_file(stock: Stock, box: Box, random: Random) -> Case:
    suffix, content = _weights(stock, box, random)
    file = box.put(f"weights.{suffix}", content)

    def action() -> int:
        start = load_pretrained(str(file), "small-residual", 16)
        assert len(start.sha256) == 64
        start.load_into(make_backbone("small-residual"))
        return 0

    return Case(action)


# Runs

_JSON = (
    "[" * 100_000,
    "{}",
    "[]",
    "null",
    "1",
    '{"data": 1}',
    '{"data": "\\ud800"}',
    '{"data": "x", "data": []}',
    "",
    "\0",
    '{"data": "' + "x" * 5_000 + '"}',
    '{"data": "\\u001b[2J"}',
    '{"classes": ["\\ud800", "b"]}',
    "9" * 5_000,
)


def _hostile_json(good: dict[str, Any], random: Random, box: Box) -> str:
    values: tuple[Any, ...] = (
        None,
        1,
        -1,
        2**70,
        [],
        {},
        [[]],
        text.name(random),
        True,
        0.5,
        ["a"],
        "linear",
        "along",
        2**19,
        [1, 2],
        [text.name(random) for _ in range(3)],
        ["a", "a", "a"],
        f"wds:pipe:mkdir {box.path / canary.NAME}",
        "torchvision:CIFAR10@/nowhere",
        str(box.given),
        "/dev/zero",
        "wds:PIPE:true",
        "file:///etc/passwd",
    )
    changed = dict(good)
    for _ in range(random.randint(1, 2)):
        changed[random.choice((*changed, "data", "labels", "val", "classes", "features", "tune"))] = random.choice(
            values
        )
    if random.random() < 0.2:
        changed.pop(random.choice(list(changed)))
    return json.dumps(changed)


def _hostile_listing(good: Path, random: Random) -> bytes:
    table = pq.read_table(good)
    names = table.column_names
    made = io.BytesIO()
    kind = random.randrange(5)
    if kind == 0:
        table = table.drop_columns([random.choice(names)])
    elif kind == 1:
        column = pa.array(random.choice(([1], [None], [[1]], [b"\xff"], [1.5], ["\x1b[2J"], ["x"])) * len(table))
        table = table.set_column(random.randrange(len(names)), random.choice(names), column)
    elif kind == 2:
        table = table.slice(random.randrange(len(table)))
    elif kind == 3:
        table = table.rename_columns([random.choice((*names, text.encodable(text.name(random)))) for _ in names])
    pq.write_table(table, made)
    return mutated(made.getvalue(), random) if kind == 4 else made.getvalue()


def _damage_run(stock: Stock, run: Path, box: Box, random: Random, names: list[str]) -> None:
    file = run / random.choice(names)
    chosen = random.random()
    whole = file.read_bytes() if file.exists() else b""
    if chosen < 0.05 and file.exists():
        file.unlink()
        random.choice((lambda: os.mkfifo(file), lambda: file.symlink_to("/dev/zero"), file.mkdir, lambda: None))()
    elif file.suffix == ".json" and chosen < 0.6:
        file.write_text(_hostile_json(json.loads(whole), random, box))
    elif file.suffix == ".json" and chosen < 0.75:
        file.write_text(random.choice(_JSON))
    elif file.suffix == ".yaml" and chosen < 0.6:
        made = _yaml(random, box)
        file.write_bytes(whole * (random.random() < 0.6) + made.encode("utf-8", "surrogatepass"))
    elif file.suffix == ".parquet" and chosen < 0.7:
        file.write_bytes(_hostile_listing(file, random))
    elif file.suffix == ".csv" and chosen < 0.7:
        rows = random.choice(
            ("split,path\n", "path\nx\n", "split,path,reason\n", "split,split\na,b\n", "", "a\0b\n", '"')
        )
        file.write_text(rows)
    elif file.suffix == ".safetensors" and chosen < 0.5:
        file.write_bytes(_weights(stock, box, random)[1])
    else:
        file.write_bytes(mutated(whole, random))


def _lead_away(run: Path, box: Box, random: Random, names: list[str]) -> None:
    """A link, or two, out of the run to what nobody may touch, in the place of what a run has or writes."""
    elsewhere = box.path / "elsewhere"
    for name in random.sample(names, random.randint(1, 2)):
        place, there = run / name, elsewhere / Path(name).name
        there.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() or random.random() < 0.5:
            place.rename(there) if place.exists() else there.mkdir()
        if not place.parent.is_symlink():
            place.parent.mkdir(exist_ok=True)
            place.symlink_to(random.choice((there, Path(os.path.relpath(there, place.parent)))))


def run_folder(stock: Stock, box: Box, random: Random) -> Case:
    run = copied(stock.run, box.given / "run")
    names = ["recipe.yaml", "environment.json", "data.parquet", "broken.csv", "backbone.safetensors"]
    if random.random() < 0.15:
        _lead_away(run, box, random, ["results", "features", "results/knn.json", *names])
    else:
        _damage_run(stock, run, box, random, names)
    action = random.choice(("evaluate", "evaluate", "finetune"))
    if action == "evaluate":
        more = ["--data", str(stock.arrays)] if random.random() < 0.3 else []
        return Case(command("evaluate", run, "--workers", "0", *more), [run])
    return Case(command("finetune", run, "--tune", "linear", "--out", box.out / "classifier", "--workers", "0"), [run])


def log_file(stock: Stock, box: Box, random: Random) -> Case:
    """What a run wrote down while it trained, and what of it is read again: the log, and results."""
    run = copied(stock.run, box.given / "run")
    log, chosen = run / "metrics.jsonl", random.random()
    if chosen < 0.5:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        said = [_hostile_json(line, random, box) if random.random() < 0.5 else json.dumps(line) for line in lines]
        log.write_text("\n".join(said) + random.choice(("", "\n")))
    elif chosen < 0.7:
        (run / "results").mkdir(exist_ok=True)
        good = {"figures": {"linear top-1": 80.0}}
        (run / "results" / "linear.json").write_text(
            random.choice((_hostile_json(good, random, box), *_JSON, '{"figures": {"linear top-1": 1e999}}'))
        )
    else:
        _damage_run(stock, run, box, random, ["metrics.jsonl", "metrics.jsonl", "data.parquet", "recipe.yaml"])
    out = box.out / f"compute.{random.choice(('png', 'svg'))}"
    return Case(command("flops", run, *(["--out", out] if random.random() < 0.3 else [])), [])


def looked_at(stock: Stock, box: Box, random: Random) -> Case:
    """A run of somebody else's is looked at: its page, beside a whole one or alone, or its suspects."""
    run = copied(stock.run, box.given / "run")
    written = ["metrics.jsonl", "recipe.yaml", "environment.json", "data.parquet", "backbone.safetensors"]
    chosen = random.random()
    if chosen < 0.15:
        _lead_away(run, box, random, ["report.html", "report-plots", "features", "checkpoints", "metrics.jsonl"])
    elif chosen < 0.3:
        file = random.choice(sorted(file for file in (run / "checkpoints").iterdir() if file.is_file()))
        file.write_bytes(mutated(file.read_bytes(), random))
    else:
        _damage_run(stock, run, box, random, written)
    if random.random() < 0.3:
        more = ["--least", "0"] if random.random() < 0.5 else []
        return Case(command("suspects", run, "--out", box.out / "suspects.csv", "--workers", "0", *more), [run])
    out = ["--out", str(box.out / "page.html")] if random.random() < 0.5 else []
    several = [run]
    if random.random() < 0.3:
        name = text.encodable(text.name(random)).replace("/", "").replace("\0", "")
        several.append(copied(stock.run, box.given / f"other {name[:40]}"))
    return Case(command("report", *several, "--workers", "0", *out), several)


def corrections(stock: Stock, box: Box, random: Random) -> Case:
    """A list of suspects that somebody has corrected."""
    good = "path,index,label,suggested,score\nclass0/0.png,0,class1,class2,0.97\nclass1/2.png,2,,class0,0.91\n"
    if random.random() < 0.5:
        content: bytes | str = mutated(good.encode(), random)
    else:
        lines = [",".join(text.name(random) for _ in range(random.randint(1, 6))) for _ in range(random.randint(0, 4))]
        content = "\n".join([random.choice((good.splitlines()[0], "path,label", "index,label")), *lines])
    file = box.put("corrected.csv", content)
    return Case(command("labels", stock.photos, "--corrections", file, "--out", box.out / "labels.csv"))


def classifier_folder(stock: Stock, box: Box, random: Random) -> Case:
    run = copied(stock.classifier, box.given / "classifier")
    _damage_run(stock, run, box, random, ["classifier.json", "classifier.json", "head.safetensors", "recipe.yaml"])
    out = box.out / f"predictions.{random.choice(('csv', 'parquet'))}"
    return Case(command("predict", run, "--data", stock.photos, "--out", out, "--workers", "0"), [run])


def embedding_parts(stock: Stock, box: Box, random: Random) -> Case:
    """What a process that was killed might have left of an embed: the right name, and anything in it."""
    run, out = cmsf.Run(stock.run), box.out / f"features.{random.choice(('npz', 'parquet'))}"
    folder = out.with_name(f".{out.name}.parts")
    folder.mkdir(parents=True)
    kept = _KeptSplit(folder, run._extractor("cpu", 0), run._named_splits(stock.photos)[0])
    place, count, width = kept.files[0], len(kept.images.split), kept.extractor.width
    index = torch.randint(-2, 2 * count, random.choice(((), (0,), (count,), (count, 1))))
    features = torch.rand(random.choice(((count, width), (count, width + 1), (width,), (0, width), (1, width))))
    chosen = random.random()
    if chosen < 0.2:
        kinds = (torch.bfloat16, torch.float64, torch.int64, torch.float32)
        save_tensors(place, {"index": torch.arange(count).to(random.choice(kinds)), "features": features})
    elif chosen < 0.4:
        save_tensors(place, {random.choice(("index", "x")): index, "features": features})
    elif chosen < 0.6:
        save_tensors(place, {"index": torch.arange(count), "features": torch.rand(count, width)})
        place.write_bytes(mutated(place.read_bytes(), random))
    elif chosen < 0.7:
        os.mkfifo(random.choice((place, folder / "stranger", folder / ".lock")))
    elif chosen < 0.8:
        random.choice((place, folder / "stranger", folder / ".lock")).mkdir()
    else:
        elsewhere = box.path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "file").write_text("nobody's")
        if random.random() < 0.3:
            folder.rmdir()
            folder.symlink_to(elsewhere)
        else:
            target = random.choice((elsewhere / "file", elsewhere / "new", elsewhere))
            random.choice((place, folder / "stranger", folder / ".lock")).symlink_to(target)
    return Case(command("embed", run.path, "--data", stock.photos, "--out", out, "--workers", "0"))


def checkpoint_files(stock: Stock, box: Box, random: Random) -> Case:
    """A run that was stopped goes on after something has happened to its checkpoints, whatever files those are."""
    run = copied(stock.stopped, box.given / "run")
    files = sorted(file for file in (run / "checkpoints").iterdir() if file.is_file())
    contents = {file: file.read_bytes() for file in files}
    for file in random.sample(files, random.randint(1, len(files))):
        content, chosen = contents[file], random.random()
        if chosen < 0.6:
            file.write_bytes(mutated(content, random))
        elif chosen < 0.7:
            file.write_bytes(contents[random.choice(files)])
        elif chosen < 0.8:
            file.write_bytes(random.choice((canary.in_a_torch_file, canary.in_a_pickle))(box.path))
        elif chosen < 0.85:
            file.write_text(random.choice(_JSON))
        elif chosen < 0.9:
            file.rename(file.with_name(random.choice(("step-99999999.pt", "step-x.pt", "step-99999999.json", "x"))))
        elif chosen < 0.95:
            file.unlink()
            os.mkfifo(file)
        else:
            file.unlink()
    if random.random() < 0.2:
        names = ["checkpoints", "tensorboard", "metrics.jsonl", ".lock", "environment.json"]
        _lead_away(run, box, random, [*names, *(f"checkpoints/{file.name}" for file in files)])

    def action() -> int:
        go_on(stock.arrays, run)
        return 0

    return Case(action, [run])


# Shards and suites


def _tar(random: Random, box: Box, stock: Stock) -> bytes:
    made = io.BytesIO()
    form = random.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))
    with tarfile.open(fileobj=made, mode="w", format=form) as archive:
        for number in range(3):
            names = (
                f"../../evil{number}.png",
                "/etc/evil.png",
                f"{number}.png",
                text.encodable(text.name(random))[:90] + ".png",
            )
            member = tarfile.TarInfo(random.choice(names))
            member.type = random.choice(
                (tarfile.REGTYPE,) * 4 + (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)
            )
            member.linkname = random.choice(("/etc/passwd", "../../x", "0.png"))
            if form == tarfile.PAX_FORMAT and random.random() < 0.4:
                member.pax_headers = random.choice(
                    (
                        {"path": "../../evil.png"},
                        {"size": "-1024"},
                        {"size": "9" * 30},
                        {"hdrcharset": "BINARY"},
                        {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
                        {"GNU.sparse.map": "0,1,a"},
                        {"comment": "9" * random.choice((100, 300_000))},
                        {"mtime": "x"},
                    )
                )
            member.size = len(stock.images["png"]) if member.isreg() else 0
            archive.addfile(member, io.BytesIO(stock.images["png"]) if member.isreg() else None)
            label = random.choice(("0", "1", text.encodable(text.name(random)), "9" * 5_000))
            for ending, content in (
                ("cls", label),
                ("json", random.choice(('{"label": "\\ud800"}', "[" * 9_000, '{"label": 1}'))),
            ):
                part = tarfile.TarInfo(f"{number}.{ending}")
                part.size = len(content.encode())
                archive.addfile(part, io.BytesIO(content.encode()))
    return made.getvalue()


def _with_size(content: bytes, size: bytes, random: Random) -> bytes:
    """A member's size overwritten, and the sum of its header with it."""
    blocks = bytearray(content)
    heads = [place for place in range(0, len(blocks), 512) if blocks[place + 257 : place + 262] == b"ustar"]
    place = random.choice(heads)
    blocks[place + 124 : place + 136] = size
    blocks[place + 148 : place + 156] = b" " * 8
    blocks[place + 148 : place + 156] = b"%06o\0 " % sum(blocks[place : place + 512])
    return bytes(blocks)


def shard_file(stock: Stock, box: Box, random: Random) -> Case:
    kind = random.randrange(6)
    content = mutated(stock.shard, random) if kind < 2 else _tar(random, box, stock)
    if kind == 2:
        sizes = (
            b"77777777777\0",
            b"\x80" + b"\0" * 3 + b"\x7f" + b"\xff" * 7,
            b"\xff" * 12,
            b"\xff" * 10 + b"\xfc\0",
            b"-0000000001\0",
        )
        content = _with_size(stock.shard, random.choice(sizes), random)
    if kind == 3:
        content = random.choice(
            (b"\x1f\x8b" + b"\0" * 99, stock.images["png"], b"", bytes(10_240), zlib.compress(stock.shard))
        )
    file = box.put("a-000000.tar", content)
    if random.random() < 0.5:
        return Case(command("labels", f"wds:{file}", "--out", box.out / "list.csv"))
    return Case(command("data", f"wds:{file}", "--out", box.out / "sheet.png"))


def suite_file(stock: Stock, box: Box, random: Random) -> Case:
    chosen = random.random()
    good = f"birds: {stock.photos}\npets: {{data: {stock.photos}, train: 1, val: 1}}\n"
    entry = random.choice(
        (
            json.dumps(text.name(random)),
            "{data: [a]}",
            "{data: x, like: &a [*a]}",
            "{data: x, train: .nan}",
            "{data: x, val: 0x" + "f" * 9_000 + "}",
            "{data: x, measure: [1]}",
            "{data: x, [a]: b}",
            f"'wds:pipe:mkdir {box.path / canary.NAME}'",
            "{data: x, test: -1}",
            f"{{data: 'wds:pipe:mkdir {box.path / canary.NAME}'}}",
            "{like: {}, data: x}",
        )
    )
    if chosen < 0.3:
        content: bytes | str = mutated(good.encode(), random)
    elif chosen < 0.6:
        content = _yaml(random, box)
    else:
        content = f"{json.dumps(text.name(random))}: {entry}\n"
    file = box.put("sets.yaml", content)
    if random.random() < 0.15:
        run = copied(stock.run, box.given / "run")
        name = random.choice(("../../../evil", f"{box.path}/evil", "\x1b[2J", "a\nb", "[/red]", "x" * 400))
        file.write_text(f"{json.dumps(name)}: {stock.arrays}\n")
        arguments = ("--with", "transfer", "--suite", file, "--trials", "1", "--workers", "1")
        return Case(
            command("evaluate", run, *arguments, "--format", random.choice(("table", "markdown", "latex"))), [run]
        )

    def action() -> int:
        from cmsf.evaluation.transfer.datasets import open_set

        for dataset in read_suite(file):
            open_set(dataset, 0)
        return 0

    return Case(action)


def flag_values(stock: Stock, box: Box, random: Random) -> Case:
    """What is typed, or handed on by a script."""
    flag = random.choice(
        ("--k", "--epochs", "--lr", "--bank-size", "--include-query", "--workers", "--threads", "--device", "--init")
    )
    value = text.name(random).replace("\0", "0")
    if random.random() < 0.5:
        return Case(command("train", "cmsf-self-small", "--data", box.given / value[:100], f"{flag}={value}"))
    words = [text.name(random).replace("\0", "0")[:200] for _ in range(3)]
    return Case(
        command(
            random.choice(
                (
                    *("train", "evaluate", "finetune", "predict", "embed", "data", "labels", "recipes", "flops"),
                    *("report", "suspects"),
                )
            ),
            *words,
        )
    )


KINDS: dict[str, Maker] = {
    "recipe files": recipe_file,
    "CSV lists": csv_list,
    "Parquet lists": parquet_list,
    "coarse mappings": mapping_file,
    "names of files": names_of_files,
    "images": image_file,
    "arrays (.npz)": npz_file,
    "weight files": weight_file,
    "run folders": run_folder,
    "classifier folders": classifier_folder,
    "logs (metrics.jsonl)": log_file,
    "runs that are looked at": looked_at,
    "corrected suspects": corrections,
    "checkpoints": checkpoint_files,
    "parts of embeddings": embedding_parts,
    "shards (.tar)": shard_file,
    "transfer suites": suite_file,
    "flags": flag_values,
}
