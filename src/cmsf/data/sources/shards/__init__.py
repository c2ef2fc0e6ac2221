"""WebDataset shards as a source of images."""

from cmsf.data.sources.shards.source import open_shards, runs_commands

__all__ = ["open_shards", "runs_commands"]
