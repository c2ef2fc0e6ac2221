"""Files that mean harm, or were damaged, and what must hold whatever they are: see `judging`."""
