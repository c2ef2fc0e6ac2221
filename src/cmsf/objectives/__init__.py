"""What a step minimises, one objective a file."""

from cmsf.objectives.byol import SymmetricBYOL
from cmsf.objectives.cross_entropy import CrossEntropy
from cmsf.objectives.fixmatch import FixMatch
from cmsf.objectives.info_nce import InfoNCE
from cmsf.objectives.isd import ISD
from cmsf.objectives.mean_shift import MeanShift, Term, constrained_mean_shift
from cmsf.objectives.nnclr import NNCLR
from cmsf.objectives.objective import (
    EXTRA,
    FIRST,
    SECOND,
    SUPPORT,
    THIRD,
    Objective,
    Outcome,
    Step,
    Together,
    Watched,
)
from cmsf.objectives.paws import PAWS
from cmsf.objectives.prototypes import Prototypes
from cmsf.objectives.simclr import SimCLR
from cmsf.objectives.simsiam import SimSiam
from cmsf.objectives.supcon import SupCon

__all__ = [
    "EXTRA",
    "FIRST",
    "ISD",
    "NNCLR",
    "PAWS",
    "SECOND",
    "SUPPORT",
    "THIRD",
    "CrossEntropy",
    "FixMatch",
    "InfoNCE",
    "MeanShift",
    "Objective",
    "Outcome",
    "Prototypes",
    "SimCLR",
    "SimSiam",
    "Step",
    "SupCon",
    "SymmetricBYOL",
    "Term",
    "Together",
    "Watched",
    "constrained_mean_shift",
]
