"""Image files of every kind become upright red, green and blue, or are named."""

import io
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile, features
from torch import Tensor

from cmsf.data import Unreadable
from cmsf.data.decoding import shrink
from cmsf.data.images import FileImages

WHOLE = 1 << 20
ORIENTATION = 0x0112

AS_STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda seen: seen,
    2: lambda seen: seen[:, ::-1],
    3: lambda seen: seen[::-1, ::-1],
    4: lambda seen: seen[::-1],
    5: lambda seen: seen.swapaxes(0, 1),
    6: lambda seen: np.rot90(seen, 1),  # the first stored row is what is seen at the right
    7: lambda seen: seen[::-1, ::-1].swapaxes(0, 1),
    8: lambda seen: np.rot90(seen, -1),  # the first stored row is what is seen at the left
}
"""What a camera writes for each value of the EXIF tag so that a picture is seen upright."""


def colours(height: int = 5, width: int = 7, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(folder: Path, image: Image.Image, name: str, **options) -> FileImages:
    image.save(folder / name, **options)
    return FileImages(folder, [name])


def pixels(files: FileImages, enough: int = WHOLE) -> np.ndarray:
    """As rows of red, green and blue."""
    decoded = files.decode(0, enough)
    assert (decoded.dtype, decoded.shape[0]) == (torch.uint8, 3)
    return decoded.permute(1, 2, 0).numpy()


def row(files: FileImages) -> list[list[int]]:
    """The pixels of the first row."""
    return pixels(files)[0].tolist()


def grey(files: FileImages) -> list[int]:
    """The values of the first row of a picture that must be grey."""
    seen = pixels(files)
    assert (seen == seen[:, :, :1]).all()
    return seen[0, :, 0].tolist()


def assert_close(seen: np.ndarray, wanted: np.ndarray | list[int], within: int) -> None:
    assert np.abs(seen.astype(int) - np.asarray(wanted)).max() <= within


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return exif


def refused(folder: Path, name: str, content: bytes) -> str:
    """Why a file cannot be read."""
    (folder / name).write_bytes(content)
    files = FileImages(folder, [name])
    with pytest.raises(Unreadable) as caught:
        files.decode(0, WHOLE)
    assert caught.value.path == name
    assert f"{name}: {caught.value.reason}" in str(caught.value)
    assert "\n" not in caught.value.reason
    return caught.value.reason


@pytest.mark.parametrize("orientation", AS_STORED)
@pytest.mark.parametrize(("name", "options"), [("x.png", {}), ("x.tif", {}), ("x.webp", {"lossless": True})])
def test_a_photo_is_seen_upright_to_the_pixel_however_the_camera_was_held(
    orientation: int, name: str, options: dict[str, bool], tmp_path: Path
) -> None:
    upright = colours()
    stored = Image.fromarray(np.ascontiguousarray(AS_STORED[orientation](upright)))
    files = save(tmp_path, stored, name, exif=turned(orientation), **options)
    assert files.size(0) == (5, 7)
    np.testing.assert_array_equal(pixels(files), upright)


@pytest.mark.parametrize("orientation", AS_STORED)
def test_a_jpeg_read_at_a_fraction_of_its_size_is_seen_upright_too(orientation: int, tmp_path: Path) -> None:
    upright = np.zeros((320, 480, 3), np.uint8)
    upright[:160, :240], upright[:160, 240:], upright[160:, :240] = (220, 30, 30), (30, 220, 30), (30, 30, 220)
    stored = Image.fromarray(np.ascontiguousarray(AS_STORED[orientation](upright)))
    files = save(tmp_path, stored, "x.jpg", exif=turned(orientation), quality=95, subsampling=0)
    assert files.size(0) == (320, 480)
    seen = pixels(files, enough=40)
    assert seen.shape == (40, 60, 3)
    assert_close(seen[4:16, 4:26], (220, 30, 30), 6)
    assert_close(seen[4:16, 34:56], (30, 220, 30), 6)
    assert_close(seen[24:36, 4:26], (30, 30, 220), 6)
    assert_close(seen[24:36, 34:56], (0, 0, 0), 6)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_avif_is_read_and_seen_upright(orientation: int, tmp_path: Path) -> None:
    upright = colours(24, 40)
    stored = Image.fromarray(np.ascontiguousarray(AS_STORED[orientation](upright)))
    files = save(tmp_path, stored, "x.avif", exif=turned(orientation), quality=100, subsampling="4:4:4")
    assert files.size(0) == (24, 40)
    assert_close(pixels(files), upright, 4)


DAMAGED_EXIF = {
    "no TIFF header": b"Exif\0\0this is no metadata at all",
    "cut off": b"Exif\0\0II*\0",
    "empty": b"Exif\0\0",
    "a list of tags beyond the end": b"Exif\0\0II*\0\xff\xff\xff\x7f",
    "more tags than bytes": b"Exif\0\0II*\0\x08\0\0\0\xff\xff" + b"\x12\x01\x03\0\x01\0\0\0",
    "an orientation that is text": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x04\0\0\0six\0\0\0\0\0",
    "an orientation that does not exist": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x63\0\0\0\0\0\0\0",
    "an orientation of none": b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\0\0\0\0\0\0\0\0",
}


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("damage", DAMAGED_EXIF)
@pytest.mark.parametrize("name", ["x.jpg", "x.png", "x.webp"])
def test_damaged_metadata_do_not_make_a_photo_unreadable(damage: str, name: str, tmp_path: Path) -> None:
    picture = Image.fromarray(colours(16, 24))
    plain = pixels(save(tmp_path, picture, f"plain-{name}"))
    files = save(tmp_path, picture, name, exif=DAMAGED_EXIF[damage])
    assert files.size(0) == (16, 24)
    np.testing.assert_array_equal(pixels(files), plain)


def test_greyscale_becomes_three_equal_colours(tmp_path: Path) -> None:
    values = np.arange(0, 256, 5, dtype=np.uint8)[None]
    for name in ("x.png", "x.tif", "x.bmp", "x.pgm", "x.tga"):
        assert grey(save(tmp_path, Image.fromarray(values), name)) == values[0].tolist()


def test_bilevel_becomes_black_and_white(tmp_path: Path) -> None:
    image = Image.new("1", (9, 2))
    for x in (0, 3, 8):
        image.putpixel((x, 0), 1)
    for name in ("x.png", "x.tif", "x.bmp", "x.pbm"):
        assert grey(save(tmp_path, image, name)) == [255, 0, 0, 255, 0, 0, 0, 0, 255]


def palette() -> Image.Image:
    """A red, a green and a blue pixel."""
    image = Image.new("P", (3, 1))
    image.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for x in range(3):
        image.putpixel((x, 0), x)
    return image


@pytest.mark.parametrize("name", ["x.png", "x.gif", "x.bmp", "x.tif"])
def test_a_palette_image_has_the_colours_of_its_palette(name: str, tmp_path: Path) -> None:
    assert row(save(tmp_path, palette(), name)) == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]


@pytest.mark.parametrize("name", ["x.png", "x.gif"])
def test_a_palette_image_with_transparency_becomes_white_where_it_is_clear(name: str, tmp_path: Path) -> None:
    files = save(tmp_path, palette(), name, transparency=1)
    assert row(files) == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]


def test_a_palette_of_half_clear_colours_is_mixed_with_white(tmp_path: Path) -> None:
    files = save(tmp_path, palette(), "x.png", transparency=bytes([255, 0, 127]))
    assert_close(pixels(files)[0], [[255, 0, 0], [255, 255, 255], [128, 128, 255]], 1)


def test_a_colour_that_is_declared_clear_becomes_white(tmp_path: Path) -> None:
    image = Image.new("RGB", (2, 1), (9, 8, 7))
    image.putpixel((1, 0), (1, 2, 3))
    assert row(save(tmp_path, image, "colour.png", transparency=(9, 8, 7))) == [[255, 255, 255], [1, 2, 3]]
    image = Image.new("L", (2, 1), 9)
    image.putpixel((1, 0), 100)
    assert grey(save(tmp_path, image, "grey.png", transparency=9)) == [255, 100]


@pytest.mark.parametrize(
    ("name", "options"), [("x.png", {}), ("x.tif", {}), ("x.webp", {"lossless": True, "exact": True}), ("x.tga", {})]
)
def test_alpha_is_laid_over_white(name: str, options: dict[str, bool], tmp_path: Path) -> None:
    image = Image.new("RGBA", (3, 1))
    for x, colour in enumerate([(200, 0, 0, 0), (200, 0, 100, 255), (200, 0, 100, 51)]):
        image.putpixel((x, 0), colour)
    seen = pixels(save(tmp_path, image, name, **options))[0]
    assert seen[:2].tolist() == [[255, 255, 255], [200, 0, 100]]
    assert_close(seen[2], [244, 204, 224], 1)  # a fifth of it


def test_grey_with_alpha_is_laid_over_white(tmp_path: Path) -> None:
    image = Image.new("LA", (3, 1))
    for x, value in enumerate([(10, 255), (10, 0), (10, 51)]):
        image.putpixel((x, 0), value)
    seen = grey(save(tmp_path, image, "x.png"))
    assert seen[:2] == [10, 255]
    assert abs(seen[2] - 206) <= 1


@pytest.mark.parametrize(("name", "within"), [("x.jpg", 4), ("x.tif", 0)])
def test_cmyk_is_seen_in_its_colours_and_not_inverted(name: str, within: int, tmp_path: Path) -> None:
    image = Image.new("CMYK", (48, 16))
    inks = [(0, 255, 255, 0), (255, 0, 255, 0), (0, 0, 0, 255)]
    for place, ink in enumerate(inks):
        image.paste(ink, (16 * place, 0, 16 * place + 16, 16))
    seen = pixels(save(tmp_path, image, name, **({"quality": 95} if name == "x.jpg" else {})))
    assert_close(seen[8, [8, 24, 40]], [[255, 0, 0], [0, 255, 0], [0, 0, 0]], within)


@pytest.mark.parametrize("name", ["x.jpg", "x.tif"])
def test_luma_and_chroma_become_colours(name: str, tmp_path: Path) -> None:
    image = Image.new("RGB", (16, 16), (200, 60, 20)).convert("YCbCr")
    assert_close(pixels(save(tmp_path, image, name)), [200, 60, 20], 3)


@pytest.mark.parametrize("kind", ["<u2", ">u2"])
@pytest.mark.parametrize("name", ["x.png", "x.tif"])
def test_sixteen_bit_grey_is_brought_to_eight_bits(kind: str, name: str, tmp_path: Path) -> None:
    levels = np.arange(256, dtype=np.uint16)
    image = Image.fromarray((257 * levels)[None].astype(kind))
    assert grey(save(tmp_path, image, name)) == levels.tolist()
    between = np.array([[1000, 12345, 40000, 65000]])
    seen = grey(save(tmp_path, Image.fromarray(between.astype(kind)), name))
    assert_close(np.array(seen), between[0] / 257, 1)


def test_dark_sixteen_bit_grey_stays_dark(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 255, 514]], np.uint16))
    assert max(grey(save(tmp_path, image, "x.png"))) <= 2


def test_sixteen_bits_a_colour_are_read(tmp_path: Path) -> None:
    """Pillow cannot write these, so the file is made by hand."""
    values = [0x12FF, 0x80FF, 0xFE01]
    body = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    body += chunk(b"IDAT", zlib.compress(b"\0" + struct.pack(">3H", *values)))
    (tmp_path / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b""))
    assert_close(pixels(FileImages(tmp_path, ["x.png"]))[0, 0], [value / 257 for value in values], 1)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0, 100, 255], [0, 100, 255]),  # eight bits in a wide file
        ([0, 25700, 65535], [0, 100, 255]),  # sixteen
        ([0, 1_000_000, 2_000_000], [0, 127.5, 255]),  # more: by their range
        ([-5, 100, 255], [0, 100, 255]),
    ],
)
def test_thirty_two_bit_integers_become_grey(values: list[int], wanted: list[float], tmp_path: Path) -> None:
    image = Image.fromarray(np.array([values], np.int32))
    assert_close(np.array(grey(save(tmp_path, image, "x.tif"))), wanted, 1)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([0, 0.5, 1], [0, 127.5, 255]),
        ([0, 100, 255], [0, 100, 255]),
        ([0, 5000, 10_000], [0, 127.5, 255]),
        ([-1, 0.5, 1], [0, 127.5, 255]),
    ],
)
def test_floating_point_becomes_grey(values: list[float], wanted: list[float], tmp_path: Path) -> None:
    image = Image.fromarray(np.array([values], np.float32))
    assert_close(np.array(grey(save(tmp_path, image, "x.tif"))), wanted, 1)


@pytest.mark.parametrize("missing", [np.nan, np.inf, -np.inf])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_pixel_without_a_value_does_not_darken_the_others(missing: float, tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 0.5, 1, missing]], np.float32))
    assert_close(np.array(grey(save(tmp_path, image, "x.tif")))[:3], [0, 127.5, 255], 1)


def test_webp_keeps_its_colours(tmp_path: Path) -> None:
    picture = colours(20, 30)
    np.testing.assert_array_equal(pixels(save(tmp_path, Image.fromarray(picture), "x.webp", lossless=True)), picture)
    files = save(tmp_path, Image.new("RGB", (32, 32), (200, 60, 20)), "y.webp", quality=90)
    assert_close(pixels(files), [200, 60, 20], 8)


@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png", "x.tif"])
def test_of_several_frames_the_first_is_seen(name: str, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (12, 10), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"lossless": True} if name == "x.webp" else {}
    files = save(tmp_path, frames[0], name, save_all=True, append_images=frames[1:], **options)
    assert files.size(0) == (10, 12)
    np.testing.assert_array_equal(pixels(files), np.broadcast_to([255, 0, 0], (10, 12, 3)))


def test_the_suffix_does_not_decide_the_kind(tmp_path: Path) -> None:
    picture = colours()
    Image.fromarray(picture).save(tmp_path / "really-a-png.jpg", format="PNG")
    np.testing.assert_array_equal(pixels(FileImages(tmp_path, ["really-a-png.jpg"])), picture)


@pytest.mark.parametrize("side", [(800, 600), (601, 999), (160, 1280), (1000, 81), (64, 64), (30, 50)])
@pytest.mark.parametrize("enough", [1, 10, 64, 75, 80, 300])
def test_a_jpeg_keeps_enough_pixels_a_side(side: tuple[int, int], enough: int, tmp_path: Path) -> None:
    files = save(tmp_path, Image.new("RGB", side), "x.jpg")
    height, width = pixels(files, enough).shape[:2]
    assert min(height, width) >= min(enough, *side)
    assert width / height == pytest.approx(side[0] / side[1], rel=0.1)
    if 2 * enough <= min(side):
        assert width < side[0]  # what will never be seen is not decoded
    if enough > min(side):
        assert (width, height) == side


def test_a_jpeg_at_a_fraction_of_its_size_looks_the_same(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.linspace(0, 255, 512).astype(np.uint8)[None, :, None], (512, 512, 3))
    files = save(tmp_path, Image.fromarray(np.ascontiguousarray(ramp)), "x.jpg", quality=95)
    whole, part = pixels(files), pixels(files, 64)
    assert part.shape == (64, 64, 3)
    assert_close(part[:, :, 0].mean(0), whole[:, :, 0].mean(0).reshape(64, 8).mean(1), 3)


@pytest.mark.parametrize(("mode", "colour"), [("L", 90), ("CMYK", (0, 255, 255, 0))])
def test_jpegs_of_other_modes_keep_enough_pixels_too(mode: str, colour: int | tuple[int, ...], tmp_path: Path) -> None:
    files = save(tmp_path, Image.new(mode, (640, 480), colour), "x.jpg", quality=95)
    whole, part = pixels(files), pixels(files, 50)
    assert min(part.shape[:2]) >= 50
    assert_close(part.mean((0, 1)), whole.mean((0, 1)), 2)


def test_decoded_pixels_lie_colour_by_colour_and_are_one_s_own(tmp_path: Path) -> None:
    files = save(tmp_path, Image.fromarray(colours(20, 30)), "x.png")
    for picture in (files.decode(0, WHOLE), shrink(files.decode(0, WHOLE), 10)):
        assert picture.permute(1, 2, 0).is_contiguous()
    first = files.decode(0, WHOLE)
    first.zero_()  # writable, and not what the next reader sees
    assert files.decode(0, WHOLE).any()


@pytest.mark.parametrize(
    ("size", "largest", "wanted"),
    [
        ((400, 200), 50, (100, 50)),
        ((200, 401), 100, (100, 200)),
        ((64, 64), 64, (64, 64)),
        ((30, 900), 64, (30, 900)),
        ((3000, 3), 2, (2000, 2)),
    ],
)
def test_shrinking_brings_the_shorter_side_down_and_never_up(
    size: tuple[int, int], largest: int, wanted: tuple[int, int]
) -> None:
    small = shrink(torch.full((3, *size), 77, dtype=torch.uint8), largest)
    assert tuple(small.shape) == (3, *wanted)
    assert (small == 77).all()


def test_shrinking_averages_instead_of_skipping() -> None:
    stripes = torch.zeros(3, 64, 64, dtype=torch.uint8)
    stripes[:, :, ::2] = 200
    small: Tensor = shrink(stripes, 8)
    assert (small.int() - 100).abs().max() <= 15


def chunk(kind: bytes, content: bytes) -> bytes:
    """A piece of a PNG."""
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes that claims to be huge."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    rows = chunk(b"IDAT", zlib.compress(bytes(100_000), 9))
    return b"\x89PNG\r\n\x1a\n" + header + rows + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_refused_before_it_takes_memory(tmp_path: Path) -> None:
    content = bomb(30_000, 30_000)
    assert len(content) < 1000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "decompression bomb" in refused(tmp_path, "bomb.png", content)
    with pytest.raises(Unreadable, match=r"bomb\.png: .*decompression bomb"):
        FileImages(tmp_path, ["bomb.png"]).size(0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def encoded(kind: str, **options) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(colours(120, 160)).save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "BMP", "WEBP", "PPM"])
def test_a_truncated_file_is_refused(kind: str, share: float, tmp_path: Path) -> None:
    whole = encoded(kind)
    assert refused(tmp_path, f"half.{kind.lower()}", whole[: int(share * len(whole))])


def test_a_progressive_jpeg_that_breaks_off_is_refused(tmp_path: Path) -> None:
    whole = encoded("JPEG", progressive=True)
    assert refused(tmp_path, "half.jpg", whole[: len(whole) // 2])


@pytest.mark.parametrize("place", [0.3, 0.5, 0.8])
def test_a_png_that_is_damaged_in_the_middle_is_refused(place: float, tmp_path: Path) -> None:
    stream = io.BytesIO()
    Image.radial_gradient("L").save(stream, "PNG")
    content = bytearray(stream.getvalue())
    start = int(place * len(content))
    content[start : start + 200] = bytes(range(200))
    assert refused(tmp_path, "damaged.png", bytes(content))


@pytest.mark.parametrize("name", ["x.png", "x.jpg", "x.tif", "x.gif", "x.bmp"])
def test_a_size_is_known_without_decoding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = save(tmp_path, Image.fromarray(colours()), name)
    loaded: list[Image.Image] = []
    load = ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: (loaded.append(image), load(image))[1])
    assert files.size(0) == (5, 7)
    assert not loaded
    files.decode(0, WHOLE)
    assert loaded


def test_what_is_no_image_is_called_that(tmp_path: Path) -> None:
    for content in (b"", b"\0", b"dear diary", b"<!DOCTYPE html><html>404</html>", bytes(5000)):
        assert refused(tmp_path, "notes.jpg", content) == "not an image, or of an unknown kind"


def test_a_file_that_is_not_there_is_called_that(tmp_path: Path) -> None:
    files = FileImages(tmp_path, ["gone.jpg"])
    for ask in (lambda: files.size(0), lambda: files.decode(0, 64)):
        with pytest.raises(Unreadable, match=r"gone\.jpg: no such file"):
            ask()


def test_a_folder_in_the_place_of_an_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jpg").mkdir()
    with pytest.raises(Unreadable, match=r"folder\.jpg: "):
        FileImages(tmp_path, ["folder.jpg"]).decode(0, 64)
