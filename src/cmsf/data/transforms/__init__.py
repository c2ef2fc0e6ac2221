"""Transforms: the views of an image that the networks see."""

from cmsf.data.transforms.augmentation import Augmentation, clean_view
from cmsf.data.transforms.batch import Batch, CroppedBatch, WholeBatch, crop_views, to_device
from cmsf.data.transforms.color import IMAGENET_MEAN, IMAGENET_STD, normalize_pixels
from cmsf.data.transforms.crops import (
    CenterCrop,
    Crop,
    DecodedImages,
    RandomCrop,
    ResizedCenterCrop,
    crop_and_resize,
    resized_crop,
)
from cmsf.data.transforms.preprocessing import STORED_SCALE, Preprocessing
from cmsf.data.transforms.rand_augment import RandAugment

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "STORED_SCALE",
    "Augmentation",
    "Batch",
    "CenterCrop",
    "Crop",
    "CroppedBatch",
    "DecodedImages",
    "Preprocessing",
    "RandAugment",
    "RandomCrop",
    "ResizedCenterCrop",
    "WholeBatch",
    "clean_view",
    "crop_and_resize",
    "crop_views",
    "normalize_pixels",
    "resized_crop",
    "to_device",
]
