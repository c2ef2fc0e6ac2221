"""The others: lightly, kornia and torchvision, each as its documentation has it, with cmsf's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import kornia.augmentation as kornia
import torch
from lightly.data import LightlyDataset
from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import (
    BYOLPredictionHead,
    BYOLProjectionHead,
    NNCLRPredictionHead,
    NNCLRProjectionHead,
    NNMemoryBankModule,
)
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import BYOLTransform, BYOLView1Transform, BYOLView2Transform
from PIL import Image
from setting import DEVIATION, MEAN, SOLARISED_FROM, WORKERS, Batches, Setting, View, endless_order
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from cmsf.recipes.recipe import ResolvedRecipe

ENDLESS = 10**9
LONGEST_WAIT = 120
NNCLR_BANK = 4096
T = TypeVar("T")


class OneByOne(Dataset[tuple[Any, int]]):
    """Images in RAM or files, and a transform; in the form of torchvision's CIFAR10, which lightly's dataset wraps."""

    def __init__(self, images: Any, open_image: Callable[[Any], Any], transform: Callable[[Any], Any]) -> None:
        self.images, self.open_image, self.transform = images, open_image, transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self.transform(self.open_image(self.images[index])), 0


def open_file(path: Path) -> Image.Image:
    return Image.open(path).convert("RGB")


def decode_file(path: Path) -> Tensor:
    return decode_image(str(path), ImageReadMode.RGB)


def as_it_is(image: Tensor) -> Tensor:
    return image


class BothViews:
    """Two transforms of one image."""

    def __init__(self, views: tuple[View, View]) -> None:
        self.transforms = [torchvision_view(view) for view in views]

    def __call__(self, image: Any) -> list[Tensor]:
        return [transform(image) for transform in self.transforms]


def torchvision_view(view: View) -> v2.Compose:
    """For PIL images and for uint8 tensors."""
    steps: list[nn.Module] = [
        v2.RandomResizedCrop(view.size, view.crop_scale, antialias=True),
        v2.RandomHorizontalFlip(view.flip),
    ]
    if view.jitter:
        jitter = v2.ColorJitter(view.brightness, view.contrast, view.saturation, view.hue)
        steps.append(v2.RandomApply([jitter], view.jitter))
    if view.greyscale:
        steps.append(v2.RandomGrayscale(view.greyscale))
    if view.blur:
        steps.append(v2.RandomApply([v2.GaussianBlur(view.blur_kernel, view.blur_sigma)], view.blur))
    if view.solarise:
        steps.append(v2.RandomSolarize(SOLARISED_FROM, view.solarise))
    return v2.Compose([*steps, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, DEVIATION)])


def lightly_view(kind: Callable[..., T], view: View) -> T:
    """The numbers are lightly's defaults, and written out so that they stay everyone's."""
    return kind(
        input_size=view.size,
        cj_prob=view.jitter,
        cj_bright=view.brightness,
        cj_contrast=view.contrast,
        cj_sat=view.saturation,
        cj_hue=view.hue,
        min_scale=view.crop_scale[0],
        random_gray_scale=view.greyscale,
        gaussian_blur=view.blur,
        solarization_prob=view.solarise,
        sigmas=view.blur_sigma,
        hf_prob=view.flip,
    )


def kornia_view(view: View, cropping: str) -> kornia.AugmentationSequential:
    """`cropping` is slice (a loop over the images) or resample (one warp of the batch).

    kornia draws one order of the jitter's steps a batch, where the others draw one an image.
    """
    solarised_from = SOLARISED_FROM / 255
    side = (view.size, view.size)
    return kornia.AugmentationSequential(
        kornia.RandomResizedCrop(side, view.crop_scale, align_corners=False, cropping_mode=cropping),
        kornia.RandomHorizontalFlip(p=view.flip),
        kornia.ColorJitter(view.brightness, view.contrast, view.saturation, view.hue, p=view.jitter),
        kornia.RandomGrayscale(p=view.greyscale),
        kornia.RandomGaussianBlur((view.blur_kernel, view.blur_kernel), view.blur_sigma, p=view.blur),
        kornia.RandomSolarize((solarised_from, solarised_from), (0.0, 0.0), p=view.solarise),
        kornia.Normalize(MEAN, DEVIATION),
        data_keys=["input"],
        same_on_batch=False,
    )


def lightly_batches(pictures: Tensor, setting: Setting) -> Batches:
    for first, _ in lightly_pairs(pictures, setting):
        yield len(first)


def torchvision_batches(images: Any, open_image: Callable[[Any], Any], setting: Setting) -> Batches:
    """Two views an image by torchvision's v2 in worker processes; `images` are tensors, arrays or paths."""
    dataset = OneByOne(images, open_image, BothViews(setting.views))
    for (first, _), _ in loader(dataset, setting.batch):
        yield len(first)


def kornia_batches(pictures: Tensor, setting: Setting, cropping: str) -> Batches:
    """Two views a batch by kornia in the main process, as it means its augmentations to be used."""
    augmentations = [kornia_view(view, cropping) for view in setting.views]
    for index in endless_order(len(pictures), setting.batch):
        images = pictures[index].float() / 255
        for augment in augmentations:
            augment(images)
        yield len(index)


def lightly_pairs(pictures: Tensor | list[Path], setting: Setting) -> Iterator[list[Tensor]]:
    """Both views a batch by lightly in worker processes, from PIL images in memory or from files."""
    first, second = setting.views
    transform = BYOLTransform(lightly_view(BYOLView1Transform, first), lightly_view(BYOLView2Transform, second))
    if isinstance(pictures, Tensor):
        images = OneByOne(pictures.permute(0, 2, 3, 1).contiguous().numpy(), Image.fromarray, transform)
    else:
        images = OneByOne(pictures, open_file, transform)
    dataset = LightlyDataset.from_torch_dataset(images, transform)
    for views, _, _ in loader(dataset, setting.batch):
        yield views


def loader(dataset: Any, batch: int) -> DataLoader[Any]:
    """Endless, so that no epoch ends within a round and the workers never run dry."""
    order = RandomSampler(dataset, num_samples=ENDLESS)
    return DataLoader(dataset, batch, sampler=order, num_workers=WORKERS, timeout=LONGEST_WAIT)


class LightlyByol(nn.Module):
    """The model of lightly's BYOL example, on a given backbone."""

    def __init__(self, backbone: nn.Module, width: int, hidden: int, dim: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.projection_head = BYOLProjectionHead(width, hidden, dim)
        self.prediction_head = BYOLPredictionHead(dim, hidden, dim)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)

    def forward(self, images: Tensor) -> Tensor:
        prediction: Tensor = self.prediction_head(self.projection_head(self.backbone(images)))
        return prediction

    def forward_momentum(self, images: Tensor) -> Tensor:
        projection: Tensor = self.projection_head_momentum(self.backbone_momentum(images))
        return projection.detach()

    def update_ema(self, momentum: float) -> None:
        update_momentum(self.backbone, self.backbone_momentum, momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, momentum)


def lightly_byol_steps(
    pictures: Tensor | list[Path],
    setting: Setting,
    backbone: nn.Module,
    width: int,
    recipe: ResolvedRecipe,
    symmetric: bool,
) -> Batches:
    """Training as in lightly's BYOL example; asymmetric, the first view alone predicts, and the second is the target.

    Backbone, its memory format and the optimiser are cmsf's, so that what differs is the way of the data and the loop.
    """
    model = LightlyByol(backbone, width, recipe.projection_hidden, recipe.projection_dim)
    criterion, optimiser = NegativeCosineSimilarity(), _sgd(model, recipe)
    for views in lightly_pairs(pictures, setting):
        first, second = (view.contiguous(memory_format=torch.channels_last) for view in views)
        model.update_ema(recipe.target_momentum)
        loss = criterion(model(first), model.forward_momentum(second))
        if symmetric:
            loss = 0.5 * (loss + criterion(model(second), model.forward_momentum(first)))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        yield len(first)


def lightly_nnclr_steps(
    pictures: Tensor | list[Path], setting: Setting, backbone: nn.Module, width: int, recipe: ResolvedRecipe
) -> Batches:
    """Training as in lightly's NNCLR example: both views through one network, and a bank of 4,096 embeddings."""
    dim, hidden = recipe.projection_dim, recipe.projection_hidden
    projector, predictor = NNCLRProjectionHead(width, hidden, dim), NNCLRPredictionHead(dim, hidden, dim)
    model = nn.ModuleList([backbone, projector, predictor])
    bank, criterion, optimiser = NNMemoryBankModule(size=(NNCLR_BANK, dim)), NTXentLoss(), _sgd(model, recipe)

    def forward(images: Tensor) -> tuple[Tensor, Tensor]:
        projection = projector(backbone(images))
        return projection.detach(), predictor(projection)

    for views in lightly_pairs(pictures, setting):
        first, second = (view.contiguous(memory_format=torch.channels_last) for view in views)
        (first_projection, first_prediction), (second_projection, second_prediction) = forward(first), forward(second)
        first_near = bank(first_projection, update=False)
        second_near = bank(second_projection, update=True)
        loss = 0.5 * (criterion(first_near, second_prediction) + criterion(second_near, first_prediction))
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        yield len(first)


def _sgd(model: nn.Module, recipe: ResolvedRecipe) -> torch.optim.SGD:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(parameters, lr=recipe.lr, momentum=recipe.sgd_momentum, weight_decay=recipe.weight_decay)
