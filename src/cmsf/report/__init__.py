"""One page of what was learned, to be opened from a disk and sent as a file."""
