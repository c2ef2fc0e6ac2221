"""The device to compute on."""

from __future__ import annotations

import torch

from cmsf.utils.errors import BadInput
from cmsf.utils.text import first_line


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """Returns the named device; of several processes on a machine, each gets the CUDA device of its local rank."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if local_rank >= count > 1:
            raise BadInput(
                f"process {local_rank} of this machine has no device of its own: there are {count}; use fewer processes"
            )
        device = torch.device("cuda", local_rank if count > 1 else 0)  # a launcher may show each process its own only
        torch.cuda.set_device(device)
        return _exact(device)
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadInput(f"--device {name} is not available: {first_line(error)}; use auto or cpu") from None
    return _exact(device)


def _exact(device: torch.device) -> torch.device:
    """Lets fp32 be fp32 on a GPU, where cuDNN's convolutions have TF32 by default: 10 bits of a mantissa's 23."""
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
    return device
