"""BatchNorm over the whole batch where every process has a share of it."""

from __future__ import annotations

import torch
from jaxtyping import Float
from timm.layers.norm_act import BatchNormAct2d, convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from cmsf.utils.distributed import World


def synchronize_batchnorm(network: nn.Module, world: World, device: torch.device) -> nn.Module:
    """Makes the network's BatchNorm layers use the batches of all processes; weights and their names stay the same.

    On CUDA this is torch's SyncBatchNorm, which does not take CPU tensors.
    """
    if world.alone:
        return network
    if device.type == "cuda":
        converted: nn.Module = convert_sync_batchnorm(network)  # timm's knows its own layers too
        return converted
    return _convert(network, world)


class SharedBatchNorm(_BatchNorm):
    """BatchNorm1d, 2d or 3d over the whole batch."""

    def __init__(self, source: _BatchNorm, world: World) -> None:
        super().__init__(source.num_features)
        self.__dict__.update(source.__dict__)  # its tensors themselves, so that references to its parameters stay valid
        self.world = world

    def forward(self, input: Float[Tensor, "b c *rest"]) -> Float[Tensor, "b c *rest"]:
        return _normalize(self, input, self.world)

    def _check_input_dim(self, input: Tensor) -> None:
        return


class SharedBatchNormAct(BatchNormAct2d):
    """timm's BatchNorm with an activation behind it, over the whole batch."""

    def __init__(self, source: BatchNormAct2d, world: World) -> None:
        super().__init__(source.num_features)
        self.__dict__.update(source.__dict__)
        self.world = world

    def forward(self, input: Float[Tensor, "b c *rest"]) -> Float[Tensor, "b c *rest"]:
        activated: Tensor = self.act(self.drop(_normalize(self, input, self.world)))
        return activated


def _normalize(norm: _BatchNorm, input: Tensor, world: World) -> Tensor:
    """(x − mean) / √(variance + ε) · weight + bias, with the mean and the variance over the images of all processes."""
    if not norm.training:
        return nn.functional.batch_norm(
            input, norm.running_mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
        )
    others = [0, *range(2, input.ndim)]
    shape = [1, -1, *[1] * (input.ndim - 2)]
    wide = input if input.dtype == torch.float64 else input.float()
    share = wide.new_full((1,), wide.numel() / wide.shape[1])
    sums = world.all_reduce(torch.cat([wide.sum(others), share]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = wide - mean.view(shape)
    # Centred first: the difference of two large sums would lose the variance.
    variance = world.all_reduce(centred.square().sum(others)) / count
    scaled = centred * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        scaled = scaled * norm.weight.view(shape) + norm.bias.view(shape)
    if norm.track_running_stats:
        _update_running_stats(norm, mean.detach(), variance.detach() * count / (count - 1))
    return scaled.to(input.dtype)


@torch.no_grad()
def _update_running_stats(norm: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    share = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
    norm.running_mean.lerp_(mean.to(norm.running_mean), share)
    norm.running_var.lerp_(variance.to(norm.running_var), share)


def _convert(module: nn.Module, world: World) -> nn.Module:
    if isinstance(module, BatchNormAct2d):
        return SharedBatchNormAct(module, world)
    if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        return SharedBatchNorm(module, world)
    for name, child in module.named_children():
        setattr(module, name, _convert(child, world))
    return module
