"""Where images come from."""

from cmsf.data.dataset import Dataset, Source, Split
from cmsf.data.sources import SAMPLE, open_source

__all__ = ["SAMPLE", "Dataset", "Source", "Split", "open_source"]
