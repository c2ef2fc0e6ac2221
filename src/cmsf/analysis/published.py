"""The paper's tables of compute and accuracy on ImageNet, as printed; docs/results/errata.md lists what is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from cmsf.analysis.compute import Compute, Passes, share_of_pass

IMAGENET_IMAGES = 1_281_167
IMAGENET_CLASSES = 1000
IMAGENET_TEST_IMAGES = 50_000

SMALL_CROP = 96
"""Pixels of a small crop, in SwAV, PAWS and CMSF alike."""
MULTI_CROP = 3.1
"""Passes of an image with the crops of SwAV and PAWS, two whole views and six small ones, as the paper rounds them."""


@dataclass(frozen=True)
class Calculation:
    """A row of the supplement's table "ResNet50 backbone training FLOPs calculation": passes in 1e8, FLOPs in 1e18.

    per_epoch: iterations an epoch; None where all of them are printed in one number.
    """

    compute: Compute
    per_epoch: int | None
    mini_batch: int
    passes: float
    flops: float


@dataclass(frozen=True)
class SemiSupervised:
    """A row of the table "Semi-supervised learning on ImageNet dataset with 10 % labels"; FLOPs in 1e18."""

    name: str
    epochs: int
    batch: int
    accelerators: int | None
    flops: float
    top_1: float
    marks: str = ""
    """The table's * (TPUs) and † (strong augmentation), and s for self-supervised pre-training, then fine-tuning."""

    @property
    def calculation(self) -> Calculation | None:
        """The row of the supplement's table; None for the one that it does not have."""
        return _CALCULATIONS.get(self.name)


@dataclass(frozen=True)
class SelfSupervised:
    """A row of Table 1, left; marks: s for a symmetric loss, m for multi-crop.

    passes: forward and backward, of an image. Not printed: from the supplement, or from the method's loss here.
    """

    name: str
    batch: int | None
    epochs: int | None
    marks: str
    linear: float
    nn: float | None = None
    nn_20: float | None = None
    passes: tuple[float, float] | None = None

    @property
    def compute(self) -> Compute | None:
        if self.passes is None or self.batch is None or self.epochs is None:
            return None
        return Compute(Passes(*self.passes, self.batch), IMAGENET_IMAGES // self.batch * self.epochs)


def _calculated(
    unlabelled: tuple[float, float, int],
    iterations: tuple[int, int] | int,
    mini_batch: int,
    passes: float,
    flops: float,
    labelled: tuple[float, float, int] = (0, 0, 0),
) -> Calculation:
    """Returns a row as the table has it: forward, backward, batch; iterations an epoch and epochs, or all of them."""
    total = iterations if isinstance(iterations, int) else iterations[0] * iterations[1]
    compute = Compute(Passes(*unlabelled), total, Passes(*labelled))
    return Calculation(compute, None if isinstance(iterations, int) else iterations[0], mini_batch, passes, flops)


_MSF = _calculated((2, 1, 256), (5004, 200), 768, 7.7, 4)
_SWAV = (MULTI_CROP, MULTI_CROP)
_CALCULATIONS = {
    "Mean Shift": _MSF,
    "BYOL": _calculated((4, 2, 4096), (312, 1000), 24576, 76.7, 40),
    "SwAV": _calculated((*_SWAV, 4096), (312, 800), 25395, 63.4, 37),
    "SimCLRv2": _calculated((2, 2, 4096), (312, 800), 16384, 40.9, 16),
    "UDA": _calculated((2, 1, 15360), 40_000, 47104, 18.8, 10, labelled=(1, 1, 512)),
    "FixMatch": _calculated((2, 1, 5120), (250, 300), 17408, 13.1, 70, labelled=(1, 1, 1024)),
    "MPL": _calculated((3, 2, 2048), 500_000, 10752, 53.8, 30, labelled=(2, 2, 128)),
    "PAWS (sup=6720)": _calculated((*_SWAV, 4096), (312, 300), 38835, 36.6, 21, labelled=(1, 1, 6720)),
    "PAWS (sup=1680)": _calculated((*_SWAV, 256), (5004, 100), 4947, 24.8, 15, labelled=(1, 1, 1680)),
    "PAWS (sup=400)": _calculated((*_SWAV, 256), (5004, 100), 2387, 12.0, 7, labelled=(1, 1, 400)),
    "CMSF semi-basic": _MSF,
    "CMSF semi": _MSF,
    "CMSF semi, mixed": _calculated((2, 1, 768), (1668, 200), 2304, 7.7, 4),
}

SEMI_SUPERVISED = (
    SemiSupervised("Mean Shift", 200, 256, 4, 4, 67.4, "s"),
    SemiSupervised("BYOL", 1000, 4096, 512, 40, 68.8, "s*"),
    SemiSupervised("SwAV", 800, 4096, 64, 37, 70.2, "s"),
    SemiSupervised("SimCLRv2", 800, 4096, 128, 16, 68.4, "s*"),
    SemiSupervised("SimCLRv2 (+Self Dist)", 1200, 4096, 128, 20, 70.5, "*"),
    SemiSupervised("UDA", 800, 15872, 64, 10, 68.1, "*†"),
    SemiSupervised("FixMatch", 300, 6144, 32, 7, 71.5, "*†"),
    SemiSupervised("MPL", 800, 2048, None, 30, 73.9, "†"),
    SemiSupervised("PAWS (sup=6720)", 300, 4096, 64, 21, 75.5),
    SemiSupervised("PAWS (sup=1680)", 100, 256, 8, 15, 70.2),
    SemiSupervised("PAWS (sup=400)", 100, 256, 4, 7, 62.9),
    SemiSupervised("CMSF semi-basic", 200, 256, 4, 4, 68.6),
    SemiSupervised("CMSF semi", 200, 256, 4, 4, 69.9),
    SemiSupervised("CMSF semi, mixed", 200, 768, 4, 4, 70.5),
)

WITH_TARGET, BOTH_WAYS, ONE_NETWORK = (2, 1), (4, 2), (2, 2)
"""Forward and backward passes an image: a view through the target and one through the network; the same with the views
exchanged as well; and both views through one network."""
_OWN_CROPS = 4 * share_of_pass(SMALL_CROP)
"""CMSF's own multi-crop has four, for the online encoder alone (implementation details)."""

SELF_SUPERVISED = (
    SelfSupervised("Supervised", 256, 100, "", 76.2, 71.4, 74.8, passes=(1, 1)),
    SelfSupervised("Random-init", None, None, "", 5.1, 1.5, 2.0),
    SelfSupervised("SeLa-v2", 4096, 400, "s", 67.2),
    SelfSupervised("SimCLR", 4096, 1000, "s", 69.3, passes=ONE_NETWORK),
    SelfSupervised("SwAV", 4096, 400, "s", 70.1, passes=ONE_NETWORK),
    SelfSupervised("DeepCluster-v2", 4096, 400, "s", 70.2),
    SelfSupervised("SimSiam", 256, 400, "s", 70.8, passes=ONE_NETWORK),
    SelfSupervised("MoCo v2", 256, 800, "", 71.1, 57.3, 61.0, passes=WITH_TARGET),
    SelfSupervised("CompRess", 256, 1130, "", 71.9, 63.3, 66.8),  # printed as 1K+130: its teacher's epochs, and its own
    SelfSupervised("InvP", 256, 800, "", 71.3),
    SelfSupervised("BYOL", 4096, 1000, "s", 74.3, 62.8, 66.9, passes=BOTH_WAYS),
    SelfSupervised("SwAV", 4096, 800, "sm", 75.3, passes=_SWAV),
    SelfSupervised("NNCLR", 4096, 1000, "", 75.4, passes=ONE_NETWORK),
    SelfSupervised("SimCLR", 4096, 200, "s", 68.3, passes=ONE_NETWORK),
    SelfSupervised("SwAV", 4096, 200, "s", 69.1, passes=ONE_NETWORK),
    SelfSupervised("MoCo v2", 256, 200, "s", 69.9, passes=BOTH_WAYS),
    SelfSupervised("SimSiam", 256, 200, "s", 70.0, passes=ONE_NETWORK),
    SelfSupervised("NNCLR", 4096, 200, "", 70.7, passes=ONE_NETWORK),
    SelfSupervised("BYOL", 4096, 200, "s", 70.6, passes=BOTH_WAYS),
    SelfSupervised("SwAV", 256, 200, "sm", 72.7, passes=_SWAV),
    SelfSupervised("Truncated Triplet", 832, 200, "s", 73.8),
    SelfSupervised("OBoW", 256, 200, "m", 73.8),
    SelfSupervised("CMSF self (128K)", 256, 200, "m", 74.4, 62.3, 66.2, passes=(2 + _OWN_CROPS, 1 + _OWN_CROPS)),
    SelfSupervised("MoCo v2", 256, 200, "", 67.5, 50.9, 54.3, passes=WITH_TARGET),
    SelfSupervised("CO2", 256, 200, "", 68.0),
    SelfSupervised("BYOL-asym", 256, 200, "", 69.3, 55.0, 59.2, passes=WITH_TARGET),
    SelfSupervised("ISD", 256, 200, "", 69.8, 59.2, 62.0, passes=WITH_TARGET),
    SelfSupervised("MSF (1M)", 256, 200, "", 72.4, 62.0, 64.9, passes=WITH_TARGET),
    SelfSupervised("MSF (256K)", 256, 200, "", 72.2, 62.1, 65.1, passes=WITH_TARGET),
    SelfSupervised("CMSF self (128K)", 256, 200, "", 73.0, 63.2, 66.4, passes=WITH_TARGET),
)

PAWS_TIMES_OURS = 4.8
"""How many times the FLOPs of CMSF semi with mixed precision PAWS (sup=6720) has, says the text."""
SYMMETRIC_TIMES = 2
"""What a symmetric loss multiplies the FLOPs by, says the head of Table 1."""
