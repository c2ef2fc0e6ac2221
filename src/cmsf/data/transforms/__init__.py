"""What the networks see of an image."""

from cmsf.data.transforms.augmentation import Augmentation, clean_view
from cmsf.data.transforms.batch import Batch, CutBatch, WholeBatch, cut_views, to_device
from cmsf.data.transforms.colours import IMAGENET_DEVIATION, IMAGENET_MEAN, normalise
from cmsf.data.transforms.crops import CentreCrop, Crop, Pictures, RandomCrop, crop_and_resize, cut, sizes
from cmsf.data.transforms.rand_augment import RandAugment

__all__ = [
    "IMAGENET_DEVIATION",
    "IMAGENET_MEAN",
    "Augmentation",
    "Batch",
    "CentreCrop",
    "Crop",
    "CutBatch",
    "Pictures",
    "RandAugment",
    "RandomCrop",
    "WholeBatch",
    "clean_view",
    "crop_and_resize",
    "cut",
    "cut_views",
    "normalise",
    "sizes",
    "to_device",
]
