"""What a step minimises, one loss a file."""

from cmsf.method.losses.base import (
    EXTRA,
    FIRST,
    SECOND,
    SUPPORT,
    THIRD,
    LoggedSearch,
    Loss,
    LossInput,
    LossOutput,
    ViewGroup,
)
from cmsf.method.losses.byol import SymmetricBYOL
from cmsf.method.losses.constrained_nce import ConstrainedNCE
from cmsf.method.losses.cross_entropy import CrossEntropy
from cmsf.method.losses.fixmatch import FixMatch
from cmsf.method.losses.info_nce import InfoNCE
from cmsf.method.losses.isd import ISD
from cmsf.method.losses.mean_shift import MeanShift, constrained_mean_shift
from cmsf.method.losses.nnclr import NNCLR
from cmsf.method.losses.paws import PAWS
from cmsf.method.losses.prototypes import Prototypes
from cmsf.method.losses.simclr import SimCLR
from cmsf.method.losses.simsiam import SimSiam
from cmsf.method.losses.spread import SPREADS
from cmsf.method.losses.supcon import SupCon
from cmsf.method.losses.terms import Spread, Term

__all__ = [
    "EXTRA",
    "FIRST",
    "ISD",
    "NNCLR",
    "PAWS",
    "SECOND",
    "SPREADS",
    "SUPPORT",
    "THIRD",
    "ConstrainedNCE",
    "CrossEntropy",
    "FixMatch",
    "InfoNCE",
    "LoggedSearch",
    "Loss",
    "LossInput",
    "LossOutput",
    "MeanShift",
    "Prototypes",
    "SimCLR",
    "SimSiam",
    "Spread",
    "SupCon",
    "SymmetricBYOL",
    "Term",
    "ViewGroup",
    "constrained_mean_shift",
]
