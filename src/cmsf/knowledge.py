"""Knowledge: who fills the columns of a query that a constraint looks at."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cmsf.bank import EmbeddingCache
from cmsf.rows import Rows


class Knowledge(ABC):
    """Fills a column of every query, and may remember what it saw."""

    companion_dim: int | None = None
    """The width of the companions it fills in; None where it fills in none."""
    wants_another_view: bool = False
    """Whether it asks for one more view of every image."""

    @abstractmethod
    def __call__(self, query: Rows, another_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        """The query with what is known of it; `another_view` embeds one more weak view by the target."""

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        return


class Nothing(Knowledge):
    """Mean shift and BYOL know nothing of an image but the image."""

    def __call__(self, query: Rows, another_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        return query


class GivenLabels(Knowledge):
    """Labels given with the data (CMSF sup); UNKNOWN where there is none."""

    def __init__(self, label: Int[Tensor, " n"]) -> None:
        self.label = label

    def __call__(self, query: Rows, another_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        return replace(query, label=self.label.to(query.index.device)[query.index])


class PreviousEpoch(Knowledge):
    """The companion is the target embedding of the same image from the epoch before, another augmentation of it.

    It is read before the new one is written, so it is never the query itself. The paper refreshes its cache when
    a row leaves the bank; as in the authors' code, ours is refreshed at once.
    """

    def __init__(self, images: int, dim: int) -> None:
        self.cache = EmbeddingCache(images, dim)
        self.companion_dim = dim

    def __call__(self, query: Rows, another_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        return replace(query, companion=self.cache.exchange(query))

    def state_dict(self) -> dict[str, Tensor]:
        return self.cache.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.cache.load_state_dict(state)


class ThirdView(Knowledge):
    """The companion is a third augmentation through the target: the paper's costlier alternative to a cache."""

    wants_another_view = True

    def __init__(self, dim: int) -> None:
        self.companion_dim = dim

    def __call__(self, query: Rows, another_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        with torch.no_grad():
            return replace(query, companion=another_view())
