"""The paper's errata: which of its figures of compute do not follow from the others, and the page that lists them."""

from pathlib import Path

from write_errata import (
    FLOPS,
    MAIN_BATCH,
    MAIN_EPOCHS,
    MAIN_FLOPS,
    PAGE,
    PASSES,
    PER_EPOCH,
    RATIO,
    SYMMETRY,
    errata,
    page,
    printed_figures,
)

from cmsf.analysis.compute import PAPERS_PASS, share_of_pass
from cmsf.analysis.published import IMAGENET_IMAGES, SEMI_SUPERVISED, SMALL_CROP


def test_exactly_these_figures_of_the_paper_do_not_follow_from_its_inputs() -> None:
    assert {(slip.row, slip.figure): (slip.printed, round(slip.computed, 2)) for slip in errata()} == {
        ("SimCLRv2", FLOPS): (16, 23.92),
        ("SimCLRv2", MAIN_FLOPS): (16, 23.92),
        ("UDA", MAIN_EPOCHS): (800, 481.93),
        ("FixMatch", FLOPS): (70, 6.89),
        ("MPL", FLOPS): (30, 29.45),
        ("MPL", MAIN_FLOPS): (30, 29.45),
        ("MPL", MAIN_BATCH): (2048, 2176),
        ("PAWS (sup=6720)", PASSES): (36.6, 36.35),
        ("PAWS (sup=6720)", MAIN_BATCH): (4096, 10816),
        ("PAWS (sup=1680)", FLOPS): (15, 14.48),
        ("PAWS (sup=1680)", MAIN_FLOPS): (15, 14.48),
        ("PAWS (sup=1680)", MAIN_BATCH): (256, 1936),
        ("PAWS (sup=400)", PASSES): (12.0, 11.95),
        ("PAWS (sup=400)", MAIN_BATCH): (256, 656),
        ("PAWS (sup=6720)", RATIO): (4.8, 5.32),
        ("SimCLR, SwAV, SimSiam", SYMMETRY): (2, 1.5),
    }
    assert all(slip.why for slip in errata())
    assert len(printed_figures()) == 13 * 6 + 11 + 3  # two rows have no iterations an epoch


def test_what_is_said_of_how_a_slip_came_about_gives_the_printed_figure() -> None:
    rows = {row.name: row.calculation.compute for row in SEMI_SUPERVISED if row.calculation is not None}
    simclr, paws, paws_400 = (rows[name] for name in ("SimCLRv2", "PAWS (sup=6720)", "PAWS (sup=400)"))
    assert round(simclr.passes * PAPERS_PASS / 1e18) == 16
    assert round(paws.mini_batch * 314 * 300 / 1e8, 1) == 36.6
    exact = 2 + 6 * share_of_pass(SMALL_CROP)
    assert round(2 * (exact * 256 + 400) * paws_400.iterations / 1e8, 1) == 12.0
    assert round(36.6 / 7.7, 1) == 4.8


def test_iterations_an_epoch_are_whole_batches_of_imagenet() -> None:
    assert all(figure.follows for figure in printed_figures() if figure.figure == PER_EPOCH)
    assert IMAGENET_IMAGES // 256 == 5004


def test_the_page_is_what_the_script_writes_and_names_every_slip() -> None:
    lines = page().splitlines()
    assert Path(__file__).parents[1] / "docs/results/errata.md" == PAGE
    assert PAGE.read_text(encoding="utf-8").splitlines() == lines
    for slip in errata():
        assert any(line.startswith(f"| {slip.row} | {slip.figure} |") and slip.why in line for line in lines)
