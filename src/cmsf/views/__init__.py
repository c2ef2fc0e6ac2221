"""What the networks see of an image."""

from cmsf.views.augmentation import Augmentation, clean_view
from cmsf.views.batch import Batch, CutBatch, WholeBatch, cut_views, to_device
from cmsf.views.colours import IMAGENET_DEVIATION, IMAGENET_MEAN, normalise
from cmsf.views.crops import CentreCrop, Crop, Pictures, RandomCrop, crop_and_resize, cut, sizes
from cmsf.views.rand_augment import RandAugment

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
