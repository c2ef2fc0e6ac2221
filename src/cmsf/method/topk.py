"""The k greatest dot products, exactly: blocks that stay in the processor's cache, and ties by image index."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cmsf.utils.constants import UNKNOWN

MAX_BLOCK = 2**26
"""How many numbers one block of the search may hold: 256 MB of float32."""
_CACHED, _COLUMNS = 2**22, 2**14
"""On a CPU, how many numbers one product gives at most: 16 MB, which stay in its cache; and of how many vectors, where
queries are many. Other devices have no use for small blocks."""
_GROUP = 16
"""How many columns share one maximum, by which the search rules most of them out."""
_WORTH_GROUPS = 32
"""Groups are used only if there are at least this many for each neighbour; with fewer, topk alone is as fast."""


@dataclass(frozen=True)
class OwnRow:
    """Each query's own row, UNKNOWN where it has none: always its nearest, whatever rounding says, or never chosen."""

    position: Int[Tensor, " b"]
    included: bool = True

    def __getitem__(self, chosen: Tensor | slice) -> OwnRow:
        return OwnRow(self.position[chosen], self.included)

    def force(self, similarity: Float[Tensor, "b n"]) -> None:
        """Sets the similarity of the own row, which is the column of its position, to inf or -inf, in place."""
        # One entry a query is written by its place: comparing every position would cost a pass of its own.
        known = (self.position != UNKNOWN).nonzero()[:, 0]
        similarity[known, self.position[known]] = torch.inf if self.included else -torch.inf

    def apply_to(self, similarity: Float[Tensor, "b n"], position: Int[Tensor, "*b n"]) -> Float[Tensor, "b n"]:
        """Sets the similarity of the own row, where it is among these positions, to inf or -inf."""
        mine = (position == self.position[:, None]) & (self.position[:, None] != UNKNOWN)
        return similarity.masked_fill(mine, torch.inf if self.included else -torch.inf)


@torch.no_grad()
def nearest_vectors(
    vector: Float[Tensor, "b d"],
    among: Float[Tensor, "n d"],
    allowed: Bool[Tensor, " n"],
    index: Int[Tensor, " n"],
    k: int,
    own: OwnRow,
) -> Int[Tensor, "b k"]:
    """Returns the k allowed vectors of greatest dot product; equal ones by lower index; UNKNOWN where they run out."""
    if not len(among):
        return torch.full((len(vector), k), UNKNOWN, device=vector.device)
    position = torch.where((own.position != UNKNOWN) & allowed[own.position], own.position, UNKNOWN)
    # One memory for all blocks: to be given a new one takes a quarter of the time of its product.
    on_cpu = among.device.type == "cpu"
    columns = min(len(among), max(_COLUMNS, _CACHED // len(vector))) if on_cpu and len(vector) else len(among)
    step = max(1, (_CACHED if on_cpu else MAX_BLOCK) // columns)
    memory = vector.new_empty(min(step, len(vector)) * columns)
    found = []
    for start in range(0, len(vector), step):
        part = slice(start, start + step)
        values, places = [], []
        # A block of columns is still in the processor's cache when its greatest are taken.
        for first in range(0, len(among), columns):
            block = slice(first, first + columns)
            shape = len(vector[part]), len(among[block])
            similarity = torch.mm(vector[part], among[block].T, out=memory[: shape[0] * shape[1]].view(shape))
            similarity.index_fill_(1, (~allowed[block]).nonzero()[:, 0], -torch.inf)
            inside = (position[part] >= first) & (position[part] < first + columns)
            OwnRow(torch.where(inside, position[part] - first, UNKNOWN), own.included).force(similarity)
            place = top(similarity, index[block], k)
            values.append(similarity.gather(1, place.clamp_min(0)).masked_fill_(place == UNKNOWN, -torch.inf))
            places.append(torch.where(place == UNKNOWN, UNKNOWN, place + first))
        if len(places) == 1:
            found += places
        else:
            place = torch.cat(places, dim=1)
            found.append(translate(top(torch.cat(values, dim=1), index[place], k), place))
    return torch.cat(found)


def top(similarity: Float[Tensor, "b n"], index: Int[Tensor, "*b n"], k: int) -> Int[Tensor, "b k"]:
    """Returns the columns of the k greatest values, equal ones by lower index, UNKNOWN for -inf and beyond the last."""
    columns = similarity.shape[1]
    if not columns:
        return torch.full((len(similarity), k), UNKNOWN, device=similarity.device)
    value, place = _greatest(similarity, min(k + 1, columns))
    if columns > k:
        # topk chooses among equals as it likes: where a tie crosses the border, sort to know which of them belong.
        tied = (value[:, k - 1] == value[:, k]) & (value[:, k] > -torch.inf)
        if tied.any():
            place[tied] = _sorted(similarity[tied], index if index.ndim == 1 else index[tied])[:, : k + 1]
        value, place = value[:, :k], place[:, :k]
    by_index = (index[place] if index.ndim == 1 else index.gather(1, place)).argsort(1)
    value, place = value.gather(1, by_index), place.gather(1, by_index)
    value, by_value = value.sort(dim=1, descending=True, stable=True)
    place = place.gather(1, by_value).masked_fill(value == -torch.inf, UNKNOWN)
    return torch.nn.functional.pad(place, (0, k - place.shape[1]), value=UNKNOWN)


def _greatest(similarity: Float[Tensor, "b n"], k: int) -> tuple[Float[Tensor, "b k"], Int[Tensor, "b k"]]:
    """torch.topk, but three times as fast among very many columns.

    The k greatest are in the k groups with the greatest maxima, and the maxima are one cheap pass. A group's columns
    are not neighbours but lie `groups` apart, so that the pass runs along the memory.
    """
    columns = similarity.shape[1]
    groups = columns // _GROUP
    if groups < _WORTH_GROUPS * k:
        return similarity.topk(k, dim=1)
    first_of_left = groups * _GROUP
    greatest = similarity[:, :first_of_left].unflatten(1, (_GROUP, groups)).amax(1)
    group = greatest.topk(k, dim=1, sorted=False).indices
    member = torch.arange(0, first_of_left, groups, device=group.device)
    left = torch.arange(first_of_left, columns, device=group.device)
    column = torch.cat([(group[:, :, None] + member).flatten(1), left.expand(len(group), -1)], dim=1)
    value, place = similarity.gather(1, column).topk(k, dim=1)
    return value, column.gather(1, place)


def _sorted(similarity: Float[Tensor, "b n"], index: Int[Tensor, "*b n"]) -> Int[Tensor, "b n"]:
    order = index.argsort(-1).expand_as(similarity)
    return order.gather(1, similarity.gather(1, order).argsort(dim=1, descending=True, stable=True))


def translate(place: Int[Tensor, "b k"], position: Int[Tensor, "b n"]) -> Int[Tensor, "b k"]:
    """Maps places in each query's own list to positions in the bank."""
    if position.shape[1] == 0:
        return place
    return torch.where(place == UNKNOWN, UNKNOWN, position.gather(1, place.clamp_min(0)))
