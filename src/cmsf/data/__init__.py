"""Where images come from."""

from cmsf.data.dataset import Dataset, Split
from cmsf.data.images import Images, Unreadable
from cmsf.data.loader import available_cores, default_workers, feed
from cmsf.data.open import SAMPLE, Request, open_source
from cmsf.data.prepare import arrange, load
from cmsf.data.sampling import Support
from cmsf.data.source import Source

__all__ = [
    "SAMPLE",
    "Dataset",
    "Images",
    "Request",
    "Source",
    "Split",
    "Support",
    "Unreadable",
    "arrange",
    "available_cores",
    "default_workers",
    "feed",
    "load",
    "open_source",
]
