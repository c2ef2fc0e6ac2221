"""What training costs: the paper's table from its inputs, and recipes and runs by the same equation."""

import pytest

from cmsf.analysis.compute import PAPERS_PASS, Compute, Passes, share_of_pass
from cmsf.analysis.published import IMAGENET_IMAGES, MULTI_CROP, SELF_SUPERVISED, SEMI_SUPERVISED, SMALL_CROP
from cmsf.analysis.slips import (
    FLOPS,
    MAIN_BATCH,
    MAIN_EPOCHS,
    MAIN_FLOPS,
    PASSES,
    PER_EPOCH,
    RATIO,
    SYMMETRY,
    printed,
    slips,
)


def total_flops(compute: Compute) -> tuple[float, float]:
    """The supplement's equation as it stands there, image by image: all passes, and FLOPs."""
    passes = flops = 0.0
    for _ in range(compute.iterations):
        for part in (compute.unlabelled, compute.labelled):
            for _ in range(part.batch):
                passes += part.forward + part.backward
                flops += part.forward * compute.per_pass + 2 * part.backward * compute.per_pass
    return passes, flops


@pytest.mark.parametrize("labelled", [Passes(), Passes(1, 1, 5), Passes(2, 0.5, 3)])
def test_passes_and_flops_are_the_sum_over_every_image_of_every_step(labelled: Passes) -> None:
    compute = Compute(Passes(3.1, 2.5, 7), 11, labelled, per_pass=13.0)
    assert (compute.passes, compute.flops) == pytest.approx(total_flops(compute))
    assert compute.mini_batch * compute.iterations == pytest.approx(compute.passes)


def test_a_small_crop_counts_by_its_area() -> None:
    assert share_of_pass(96) == pytest.approx(0.184, abs=5e-4)  # the paper's own example
    assert round(2 + 6 * share_of_pass(SMALL_CROP), 1) == MULTI_CROP  # SwAV's and PAWS's


COMPUTED = {
    "Mean Shift": (768, 7.686, 3.997),
    "BYOL": (24576, 76.677, 39.872),
    "SwAV": (25395.2, 63.386, 37.081),
    "SimCLRv2": (16384, 40.894, 23.923),
    "UDA": (47104, 18.842, 9.824),
    "FixMatch": (17408, 13.056, 6.889),
    "MPL": (10752, 53.760, 29.453),
    "PAWS (sup=6720)": (38835.2, 36.350, 21.265),
    "PAWS (sup=1680)": (4947.2, 24.756, 14.482),
    "PAWS (sup=400)": (2387.2, 11.946, 6.988),
    "CMSF semi-basic": (768, 7.686, 3.997),
    "CMSF semi": (768, 7.686, 3.997),
    "CMSF semi, mixed": (2304, 7.686, 3.997),
}
"""By hand: mini-batch, passes in 1e8, FLOPs in 1e18."""


def test_every_row_of_the_papers_table_follows_from_its_inputs() -> None:
    found = {row.name: row.calculation.compute for row in SEMI_SUPERVISED if row.calculation is not None}
    assert found.keys() == COMPUTED.keys()
    for name, compute in found.items():
        figures = (compute.mini_batch, compute.passes / 1e8, compute.flops / 1e18)
        assert figures == pytest.approx(COMPUTED[name], abs=5e-4)
        assert compute.per_pass == PAPERS_PASS


def test_exactly_these_figures_of_the_paper_do_not_follow_from_its_inputs() -> None:
    assert {(slip.row, slip.figure): (slip.printed, round(slip.computed, 2)) for slip in slips()} == {
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
    assert all(slip.why for slip in slips())
    assert len(printed()) == 13 * 6 + 11 + 3  # two rows have no iterations an epoch


def test_what_is_said_of_how_a_slip_came_about_gives_the_printed_figure() -> None:
    rows = {row.name: row.calculation.compute for row in SEMI_SUPERVISED if row.calculation is not None}
    simclr, paws, paws_400 = (rows[name] for name in ("SimCLRv2", "PAWS (sup=6720)", "PAWS (sup=400)"))
    assert round(simclr.passes * PAPERS_PASS / 1e18) == 16
    assert round(paws.mini_batch * 314 * 300 / 1e8, 1) == 36.6
    exact = 2 + 6 * share_of_pass(SMALL_CROP)
    assert round(2 * (exact * 256 + 400) * paws_400.iterations / 1e8, 1) == 12.0
    assert round(36.6 / 7.7, 1) == 4.8


def test_iterations_an_epoch_are_whole_batches_of_imagenet() -> None:
    assert all(figure.follows for figure in printed() if figure.figure == PER_EPOCH)
    assert IMAGENET_IMAGES // 256 == 5004


def test_the_self_supervised_table_costs_what_the_supplement_says_of_the_same_methods() -> None:
    def flops(name: str, epochs: int, multi_crop: bool = False) -> float:
        rows = [row for row in SELF_SUPERVISED if (row.name, row.epochs, row.multi_crop) == (name, epochs, multi_crop)]
        assert rows[0].compute is not None
        return rows[0].compute.flops / 1e18

    assert flops("BYOL", 1000) == pytest.approx(39.872, abs=5e-4)
    assert flops("SwAV", 800, multi_crop=True) == pytest.approx(37.081, abs=5e-4)
    assert flops("MSF (256K)", 200) == flops("CMSF self (128K)", 200) == pytest.approx(3.997, abs=5e-4)
    assert flops("CMSF self (128K)", 200, multi_crop=True) == pytest.approx(6.199, abs=5e-4)  # four small crops
