"""WebDataset shards as a source of images."""

from cmsf.data.shards.source import open_shards, runs_commands

__all__ = ["open_shards", "runs_commands"]
