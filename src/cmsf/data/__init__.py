"""Where images come from."""

from cmsf.data.dataset import Dataset, Split
from cmsf.data.feeding import available_cores, default_workers, feed
from cmsf.data.images import Images, Unreadable
from cmsf.data.loading import arrange, load
from cmsf.data.source import Source
from cmsf.data.sources import SAMPLE, Request, open_source
from cmsf.data.support import Support

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
