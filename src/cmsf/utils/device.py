"""Which device a command computes on."""

from __future__ import annotations

import torch

from cmsf.utils.errors import BadInput
from cmsf.utils.text import first_line


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a name; of several processes on a machine, each has the CUDA device of its number."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        there = torch.cuda.device_count()
        if local_rank >= there > 1:
            raise BadInput(
                f"process {local_rank} of this machine has no device of its own: there are {there}; use fewer"
            )
        device = torch.device("cuda", local_rank if there > 1 else 0)  # a launcher may show each process its own alone
        torch.cuda.set_device(device)
        return device
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"--device {name} is not available: {first_line(error)}; use auto or cpu") from None
    return device
