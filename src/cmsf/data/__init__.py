"""Data: sources of images, splits, labels, loading and transforms."""

from cmsf.data.dataset import Dataset, Split
from cmsf.data.images import Images, Unreadable
from cmsf.data.loader import available_cores, load_batches
from cmsf.data.open import SAMPLE, DataConfig, open_source
from cmsf.data.prepare import build_dataset, load_dataset
from cmsf.data.sampling import SupportSampler
from cmsf.data.source import Source

__all__ = [
    "SAMPLE",
    "DataConfig",
    "Dataset",
    "Images",
    "Source",
    "Split",
    "SupportSampler",
    "Unreadable",
    "available_cores",
    "build_dataset",
    "load_batches",
    "load_dataset",
    "open_source",
]
