"""Sources of images, one kind a file."""
