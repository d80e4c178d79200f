"""Windows: batches of several stores at fixed places, in one piece."""

import pytest
import torch

from parlay.stores import HostStore
from parlay.stores.courier import ALIGNED, parcel_bytes, parts
from parlay.stores.window import Windows

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_parcel_are_aligned_and_apart(dtype: torch.dtype) -> None:
    contents = [torch.zeros(10, width, dtype=dtype) for width in (3, 7, 128, 1)]
    parcel = torch.zeros(parcel_bytes(contents, 5), dtype=torch.uint8)
    found = parts(parcel, contents, 5)
    for k, (part, rows) in enumerate(zip(found, contents, strict=True)):
        assert part.shape == (5, rows.shape[1])
        assert part.dtype == dtype
        assert (part.data_ptr() - parcel.data_ptr()) % ALIGNED == 0
        part.fill_(k + 1)
    assert all(bool((part == k + 1).all()) for k, part in enumerate(found))


def test_one_content_is_a_parcel_as_it_is() -> None:
    rows = torch.randn(6, 5)
    assert torch.equal(parts(rows.view(torch.uint8).view(-1), [rows], 6)[0], rows)
    assert parcel_bytes([rows], 6) == rows.nbytes


def test_a_window_holds_what_was_brought_until_new_values_are_carried_away() -> None:
    stores = [HostStore(20, shape, torch.float32, CPU) for shape in ((2, 3, 3), (5,))]
    for store in stores:
        store.load(torch.randn(20, *store.shape))
    before = [store.tensor().clone() for store in stores]
    windows, ids = Windows(stores, 4), torch.tensor([7, 1, 19, 4])
    windows.bring(ids)
    for store, old in zip(stores, before, strict=True):
        window = windows.of(store)
        window.scatter(ids, 2 * window.gather(ids))
        assert torch.equal(window.gather(ids), old[ids])
        assert torch.equal(store.tensor(), old)
    windows.carry(ids)
    windows.close()
    for store, old in zip(stores, before, strict=True):
        old[ids] *= 2
        assert torch.equal(store.tensor(), old)
