"""Between host and GPU: what is gathered is what was scattered, whenever the copies happen."""

from pathlib import Path

import pytest
import torch

from parlay.stores import KINDS, HostStore, make_store
from parlay.stores.window import Windows

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_an_epoch_of_steps_equals_the_same_on_the_cpu(kind: str, tmp_path: Path) -> None:
    samples, shape = 1000, (16, 32, 32)
    made = make_store(kind, samples, shape, torch.float32, torch.device("cuda"), tmp_path / "s")
    expected = torch.zeros(samples, *shape)
    for _ in range(3):
        batches = torch.split(torch.randperm(samples), 96)
        for step, ids in enumerate(batches):
            batch = made.gather(ids)
            if step + 1 < len(batches):
                made.prefetch(batches[step + 1])
            assert torch.equal(batch.cpu(), expected[ids])
            made.scatter(ids, 2 * batch + ids.cuda().view(-1, 1, 1, 1))
            expected[ids] = 2 * expected[ids] + ids.view(-1, 1, 1, 1)
    assert torch.equal(made.tensor().cpu(), expected)
    made.close()


def test_a_gather_sees_a_scatter_whose_values_the_gpu_has_not_computed_yet(tmp_path: Path) -> None:
    for kind in ("host", "file"):
        made = make_store(kind, 64, (256, 256), torch.float32, torch.device("cuda"), tmp_path / "s")
        ids = torch.arange(32)
        made.prefetch(ids)
        values = torch.ones(32, 256, 256, device="cuda")
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        made.scatter(ids, 3 * values)
        del values
        trap = torch.full((32, 256, 256), -1.0, device="cuda")
        assert bool((made.gather(ids) == 3).all())
        assert bool((trap == -1).all())
        made.close()


def test_a_prefetch_of_other_ids_is_not_mistaken_for_those_gathered() -> None:
    made = HostStore(8, (4,), torch.float32, torch.device("cuda"))
    made.load(torch.arange(8.0).view(8, 1).expand(8, 4).contiguous())
    ids = torch.tensor([1, 2])
    made.prefetch(ids)
    ids.fill_(5)
    assert made.gather(torch.tensor([2, 1]))[:, 0].tolist() == [2, 1]
    assert made.gather(torch.tensor([1, 2]))[:, 0].tolist() == [1, 2]
    made.prefetch(torch.tensor([3]))
    made.load(torch.full((8, 4), 9.0))
    assert made.gather(torch.tensor([3]))[:, 0].tolist() == [9]
    made.close()


def test_a_batch_stays_whole_while_later_ones_arrive() -> None:
    made = HostStore(256, (512, 512), torch.float32, torch.device("cuda"))
    made.load(torch.arange(256.0).view(256, 1, 1).expand(256, 512, 512).contiguous())
    sums = []
    for ids in torch.split(torch.arange(256), 16):
        batch = made.gather(ids)
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        sums.append(batch.mean((1, 2)))
        del batch
        made.prefetch((ids + 16) % 256)
    assert torch.equal(torch.cat(sums).cpu(), torch.arange(256.0))
    made.close()


def test_values_that_are_overwritten_after_a_scatter_arrive_as_they_were() -> None:
    made = HostStore(32, (512, 512), torch.float32, torch.device("cuda"))
    values = torch.empty(32, 512, 512, device="cuda")
    for step in range(5):
        values.fill_(step)
        made.scatter(torch.arange(32), values)
        values.fill_(-1)
        assert bool((made.tensor() == step).all())
    made.close()


def test_an_error_behind_the_scenes_comes_out_at_the_next_call() -> None:
    made = HostStore(8, (4,), torch.float32, torch.device("cuda"))
    made.scatter(torch.tensor([99]), torch.zeros(1, 4, device="cuda"))
    with pytest.raises(IndexError):
        made.tensor()
    made.close()


def test_ids_may_come_on_the_gpu(tmp_path: Path) -> None:
    for kind in KINDS:
        made = make_store(kind, 8, (4,), torch.bfloat16, torch.device("cuda"), tmp_path / "s")
        ids = torch.tensor([1, 2], device="cuda")
        made.prefetch(ids)
        made.scatter(ids, torch.ones(2, 4, device="cuda"))
        assert made.gather(ids).dtype == torch.bfloat16
        assert made.gather(torch.arange(8))[:, 0].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
        made.close()


def test_batches_of_several_stores_go_together_and_last_ones_by_themselves() -> None:
    shapes, samples, size = [(16, 32, 32), (7,), (3, 5, 5), (16, 32, 32)], 1000, 96
    stores = [HostStore(samples, shape, torch.float32, torch.device("cuda")) for shape in shapes]
    expected = [torch.zeros(samples, *shape) for shape in shapes]
    windows = Windows(stores, size)
    for _ in range(3):
        batches = torch.split(torch.randperm(samples), size)
        for ids, following in zip(batches, [*batches[1:], None], strict=True):
            whole = len(ids) == size
            if whole:
                windows.bring(ids)
                if following is not None:
                    windows.prefetch(following)
            for store, values in zip(stores, expected, strict=True):
                seen = windows.of(store) if whole else store
                batch = seen.gather(ids)
                assert torch.equal(batch.cpu(), values[ids])
                seen.scatter(ids, 2 * batch + ids.cuda().view(-1, *[1] * len(store.shape)))
                values[ids] = 2 * values[ids] + ids.view(-1, *[1] * len(store.shape))
            if whole:
                windows.carry(ids)
    for store, values in zip(stores, expected, strict=True):
        assert torch.equal(store.tensor(), values)
    windows.close()
    for store in stores:
        store.close()
