import pytest
import torch
from helpers import random_rows, unit
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import normalize

from cmsf.method.bank import EmbeddingCache, MemoryBank
from cmsf.method.constraints import SameLabel
from cmsf.method.rows import Rows
from cmsf.utils.constants import UNKNOWN


class ListBank:
    """The ring as a plain list of (embedding, index, label), None where a row is not there."""

    def __init__(self, size: int) -> None:
        self.slots: list[tuple[float, int, int] | None] = [None] * size
        self.next = 0

    def enqueue(self, rows: list[tuple[float, int, int]]) -> None:
        for row in rows:
            self.slots = [None if slot and slot[1] == row[1] else slot for slot in self.slots]
            self.slots[self.next] = row
            self.next = (self.next + 1) % len(self.slots)

    def live(self) -> list[tuple[int, float, int, int]]:
        return [(place, *slot) for place, slot in enumerate(self.slots) if slot]


def live(bank: MemoryBank) -> list[tuple[int, float, int, int]]:
    rows = bank.rows()
    return [
        (place, float(rows.embedding[place, 0]), int(rows.index[place]), int(rows.label[place]))
        for place in range(len(rows))
        if int(rows.index[place]) != UNKNOWN
    ]


@given(data=st.data())
def test_the_ring_does_what_a_plain_list_does(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 12))
    images = data.draw(st.integers(size, 20))
    bank, plain = MemoryBank(size, 1, dtype=torch.float64), ListBank(size)
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(1, size))
        # Repeats within a batch and across batches, and batches that do not divide the bank.
        index = data.draw(st.lists(st.integers(0, images - 1), min_size=count, max_size=count))
        value = data.draw(st.lists(st.floats(-1, 1, width=32), min_size=count, max_size=count))
        label = data.draw(st.lists(st.integers(-1, 3), min_size=count, max_size=count))
        bank.enqueue(Rows(torch.tensor(value).double()[:, None], torch.tensor(index), torch.tensor(label)))
        plain.enqueue(list(zip(value, index, label, strict=True)))
        assert live(bank) == plain.live()


def test_only_written_rows_exist() -> None:
    bank = MemoryBank(10, 6, companion_dim=6, dtype=torch.float64)
    assert len(bank.rows()) == 0
    rows = random_rows(4, seed=0)
    bank.enqueue(rows)
    assert len(bank.rows()) == 4
    torch.testing.assert_close(bank.rows().embedding, rows.embedding)


def test_an_image_has_at_most_one_live_row_over_many_epochs() -> None:
    bank, images = MemoryBank(16, 2), 20
    for epoch in range(5):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(epoch))
        for index in order.split(7):
            bank.enqueue(Rows(unit(len(index), 2, epoch).float(), index, index % 3))
            there = bank.rows().index[bank.rows().exists]
            assert len(there.unique()) == len(there)
            assert set(index.tolist()) <= set(there.tolist())


def test_a_retired_row_has_neither_label_nor_companion() -> None:
    bank = MemoryBank(4, 6, companion_dim=6, dtype=torch.float64)
    rows = random_rows(2, seed=0)
    bank.enqueue(rows)
    bank.enqueue(rows)
    assert bank.index.tolist() == [UNKNOWN, UNKNOWN, *rows.index.tolist()]
    assert bank.label[:2].tolist() == [UNKNOWN, UNKNOWN]
    assert bank.rows().has_companion.tolist() == [False, False, True, True]


def test_a_batch_larger_than_the_bank_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="5 rows does not fit a bank of 4"):
        MemoryBank(4, 6).enqueue(random_rows(5, seed=0))


def test_a_bank_neither_drops_companions_nor_makes_them_up() -> None:
    rows = random_rows(3, seed=0)
    with pytest.raises(ValueError, match="make it with companion_dim=6"):
        MemoryBank(4, 6, dtype=torch.float64).enqueue(rows)
    with pytest.raises(ValueError, match="give a row of NaN"):
        MemoryBank(4, 6, companion_dim=6, dtype=torch.float64).enqueue(Rows(rows.embedding, rows.index))


def test_a_saved_bank_goes_on_where_it_was() -> None:
    first, second = (MemoryBank(5, 6, companion_dim=6, dtype=torch.float64) for _ in range(2))
    first.enqueue(random_rows(3, seed=0))
    second.load_state_dict(first.state_dict())
    for bank in (first, second):
        bank.enqueue(random_rows(4, seed=1))
    assert live(first) == live(second)
    assert first.next == second.next == 2


def test_the_cache_hands_out_what_it_had_before_it_learns_the_new() -> None:
    cache = EmbeddingCache(8, 6, dtype=torch.float64)
    older = Rows(unit(3, 6, 0), torch.tensor([1, 5, 7]))
    newer = Rows(unit(3, 6, 1), torch.tensor([5, 2, 7]))
    assert cache.swap(older).isnan().all()
    remembered = cache.swap(newer)
    torch.testing.assert_close(remembered[[0, 2]], older.embedding[[1, 2]], rtol=0, atol=0)
    assert remembered[1].isnan().all()


def test_positions_are_found_by_image_and_unknown_images_nowhere() -> None:
    rows = Rows(unit(4, 2, 0), torch.tensor([9, UNKNOWN, 3, 5]))
    assert rows[:0].positions_of(torch.tensor([5])).tolist() == [UNKNOWN]
    assert rows.positions_of(torch.tensor([5, 4, 9, UNKNOWN, 100])).tolist() == [3, UNKNOWN, 0, UNKNOWN, UNKNOWN]


def class_means(bank: MemoryBank, query: Rows) -> torch.Tensor:
    return bank.search(query, SameLabel(), None, include_query=False).mean


def test_running_sums_of_labels_are_those_computed_anew_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    bank = MemoryBank(50, 8)
    for _ in range(40):
        index = torch.randint(70, (9,), generator=generator)  # images come again, also within a batch
        label = torch.randint(-1, 5, (9,), generator=generator)
        rows = Rows(normalize(torch.randn(9, 8, generator=generator), dim=1), index, label)
        bank.enqueue(rows)
        query = rows[label != UNKNOWN]
        running = class_means(bank, query)
        anew = MemoryBank(50, 8)
        anew.load_state_dict(bank.state_dict())
        assert torch.equal(running, class_means(anew, query))
        everything = bank.rows()
        for mean, image, of in zip(running, query.index.tolist(), query.label.tolist(), strict=True):
            members = everything.embedding[everything.exists & (everything.label == of) & (everything.index != image)]
            torch.testing.assert_close(mean, members.double().sum(0).div(max(1, len(members))).float())


def test_a_sum_of_labels_with_nan_is_nan_until_the_row_is_gone() -> None:
    bank = MemoryBank(2, 3)
    bad, good, query = (
        Rows(torch.eye(3)[:1] * scale, torch.tensor([image]), torch.tensor([4]))
        for image, scale in enumerate((torch.nan, 1.0, 1.0))
    )
    bank.enqueue(bad)
    assert class_means(bank, query).isnan().all()
    bank.enqueue(good)
    assert class_means(bank, query).isnan().all()
    bank.enqueue(query)
    torch.testing.assert_close(class_means(bank, query), torch.eye(3)[:1])
