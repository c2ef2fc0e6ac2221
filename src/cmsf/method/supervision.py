"""Supervision: fills in the labels or companions of the queries, which the constraints look at."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.method.bank import EmbeddingCache
from cmsf.method.pseudo_labels import PseudoClassifier, leave_one_out_accuracy
from cmsf.method.rows import Rows
from cmsf.utils.constants import UNKNOWN
from cmsf.utils.distributed import World

TRUSTED_FROM = 60.0
"""Per cent of labels that leave-one-out finds: below, pseudo-labels are not to be trusted."""

Embed = Callable[[Int[Tensor, " m"]], Float[Tensor, "m d"]]
"""Returns the target's embeddings of clean views of images, by their indices."""


@dataclass(frozen=True)
class PseudoLabelOutput:
    """Predicted labels of images without one, UNKNOWN before the first training, and whether each is confident enough
    to be used."""

    index: Int[Tensor, " u"]
    label: Int[Tensor, " u"]
    confident: Bool[Tensor, " u"]


class Supervision(ABC):
    """Fills in labels or companions of every query; may keep state."""

    companion_dim: int | None = None
    """The width of its companions; None: it has none."""
    needs_third_view: bool = False
    """Whether it needs a third view of every image."""
    pseudo_labels: PseudoLabelOutput | None = None
    """Predictions for the last batch's unlabelled images; None where it makes none."""
    seconds: float = 0.0
    """Time spent in it so far."""
    companion_cache: EmbeddingCache | None = None
    """Companions of all images: as long as the data, so saved apart from `state_dict`."""

    @abstractmethod
    def __call__(self, query: Rows, third_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        """Returns the query with labels or companions; `third_view` embeds one more weak view by the target."""

    def refresh(self, embed: Embed) -> None:
        """Trains on what was stored; called in the middle of an epoch and before the next one begins."""
        return

    def trust(self) -> float | None:
        """Returns, in per cent, how often its predictions are likely to be right; None where nobody can know."""
        return None

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        return


class NoSupervision(Supervision):
    """No labels and no companions: mean shift and BYOL."""

    def __call__(self, query: Rows, third_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        return query


class GivenLabels(Supervision):
    """Labels given with the data (CMSF sup); UNKNOWN where there is none."""

    def __init__(self, label: Int[Tensor, " n"]) -> None:
        self.label = label

    def __call__(self, query: Rows, third_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        return replace(query, label=self.label.to(query.index.device)[query.index])


class PreviousEpoch(Supervision):
    """The companion is the target embedding of the same image from the epoch before, another augmentation of it.

    It is read before the new one is written, so it is never the query itself. The paper refreshes its cache when
    a row leaves the bank; as in the authors' code, ours is refreshed at once.
    """

    companion_cache: EmbeddingCache

    def __init__(self, images: int, dim: int, dtype: torch.dtype = torch.float32, world: World = World()) -> None:
        self.companion_cache = EmbeddingCache(images, dim, dtype, world)
        self.companion_dim = dim

    def __call__(self, query: Rows, third_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        return replace(query, companion=self.companion_cache.swap(query))


class ThirdView(Supervision):
    """The companion is a third augmentation through the target: the paper's costlier alternative to a cache."""

    needs_third_view = True

    def __init__(self, dim: int) -> None:
        self.companion_dim = dim

    def __call__(self, query: Rows, third_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        with torch.no_grad():
            return replace(query, companion=third_view())


class PseudoLabels(Supervision):
    """Given labels, and for other images those of a classifier where it is confident (CMSF semi, Sec. 2.3).

    The classifier learns, twice an epoch, from the target's embeddings of the labelled images: those of training's own
    views, remembered as they pass (online), or those of clean views, computed each time (offline). Slots never filled
    are not learned from, and before the first time nothing is guessed. Below the threshold a query has no label, so
    it relaxes to C = M and its row is in no label's set.
    """

    def __init__(
        self,
        label: Int[Tensor, " n"],
        dim: int,
        classifier: PseudoClassifier,
        threshold: float,
        offline: bool,
        dtype: torch.dtype,
        world: World = World(),
    ) -> None:
        self.world = world
        self.label, self.classifier, self.threshold, self.offline = label, classifier, threshold, offline
        self.labelled = (label != UNKNOWN).nonzero()[:, 0]
        self.slot = torch.full_like(label, UNKNOWN)
        self.slot[self.labelled] = torch.arange(len(self.labelled), device=label.device)
        self.cache = EmbeddingCache(len(self.labelled), dim, dtype)
        self.times_trained = 0

    def __call__(self, query: Rows, third_view: Callable[[], Float[Tensor, "b d"]]) -> Rows:
        with self._timed():
            given = self.label[query.index]
            known = given != UNKNOWN
            if not self.offline:
                self.cache.swap(Rows(query.embedding[known], self.slot[query.index[known]]))
            self.pseudo_labels = self._predict(query[~known])
            label = given.clone()
            label[~known] = torch.where(self.pseudo_labels.confident, self.pseudo_labels.label, UNKNOWN)
            return replace(query, label=label)

    def refresh(self, embed: Embed) -> None:
        with self._timed():
            if self.offline:
                slots = torch.arange(len(self.labelled), device=self.label.device)
                mine = self.labelled[self.world.chunk(len(self.labelled))]
                self.cache.swap(Rows(self.world.gather(embed(mine)), slots))
            rows = self._labelled_rows()
            if len(self.label[self.labelled][rows.exists].unique()) < 2:
                return  # nothing to tell apart yet, and so nothing to guess
            self.classifier.fit(rows, self.times_trained)
            # Every process has trained the same classifier, up to nondeterminism of its device; banks must not differ.
            self.world.broadcast(self.classifier)
            self.times_trained += 1

    def trust(self) -> float | None:
        """Returns, in per cent, how often the labelled images that are nearest to another have its label."""
        with self._timed():
            accuracy = leave_one_out_accuracy(self._labelled_rows())
            return None if accuracy is None else 100 * accuracy

    def _labelled_rows(self) -> Rows:
        """Returns a row for each labelled image; one whose slot was never filled does not exist."""
        embedding = self.cache.embedding.to(self.label.device)
        filled = ~embedding[:, 0].isnan()
        return Rows(embedding, torch.where(filled, self.labelled, UNKNOWN), self.label[self.labelled])

    def _predict(self, unlabelled: Rows) -> PseudoLabelOutput:
        if not self.times_trained or not len(unlabelled):
            nothing = torch.full_like(unlabelled.index, UNKNOWN)
            return PseudoLabelOutput(unlabelled.index, nothing, torch.zeros_like(nothing, dtype=torch.bool))
        confidence, label = self.classifier(unlabelled.embedding).max(1)
        # Decided once: what is near to the threshold may be above it in one process and below in another.
        label, confident = self.world.from_main(torch.stack([label, (confidence >= self.threshold).long()]))
        return PseudoLabelOutput(unlabelled.index, label, confident.bool())

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self.seconds += self._now() - start

    def _now(self) -> float:
        if self.label.is_cuda:  # wait for earlier work, which is not to be counted here
            torch.cuda.synchronize(self.label.device)
        return time.perf_counter()

    def state_dict(self) -> dict[str, Tensor]:
        classifier = {f"classifier.{name}": value for name, value in self.classifier.state_dict().items()}
        return {"embedding": self.cache.embedding, **classifier, "times_trained": torch.tensor(self.times_trained)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.cache.load_snapshot(state["embedding"])
        prefix = "classifier."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        self.classifier.load_state_dict(own)
        self.times_trained = int(state["times_trained"])
