"""Between host and GPU: what is gathered is what was scattered, whenever the copies happen."""

from pathlib import Path

import pytest
import torch

from parlay.stores import KINDS, HostStore, free_space, make_store

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GPU = torch.device("cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_an_epoch_of_steps_equals_the_same_on_the_cpu(kind: str, tmp_path: Path) -> None:
    samples, shape = 1000, (16, 32, 32)
    made = make_store(kind, samples, shape, torch.float32, GPU, tmp_path / "s")
    expected = torch.zeros(samples, *shape)
    for _ in range(3):
        batches = torch.split(torch.randperm(samples), 96)
        for ids, following in zip(batches, [*batches[1:], None], strict=True):
            batch = made.gather(ids)
            if following is not None:
                made.prefetch(following)
            assert torch.equal(batch.cpu(), expected[ids])
            made.scatter(ids.cuda() if kind == "device" else ids, 2 * batch + ids.cuda().view(-1, 1, 1, 1))
            expected[ids] = 2 * expected[ids] + ids.view(-1, 1, 1, 1)
    assert torch.equal(made.tensor().cpu(), expected)
    made.close()


@pytest.mark.parametrize("kind", ["host", "file"])
def test_copies_wait_for_the_gpu_and_batches_stay_whole(kind: str, tmp_path: Path) -> None:
    """Values that are not computed yet, or overwritten after the call; batches while later ones arrive."""
    made = make_store(kind, 64, (256, 256), torch.float32, GPU, tmp_path / "s")
    ids = torch.arange(32)
    made.prefetch(ids)
    values = torch.ones(32, 256, 256, device=GPU)
    torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    made.scatter(ids, values.mul_(3))
    values.fill_(-1)
    first = made.gather(ids)
    torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
    made.prefetch(ids + 32)
    made.gather(ids + 32)
    assert bool((first == 3).all())
    assert bool((made.tensor()[:32] == 3).all())
    made.close()


def test_a_prefetch_of_other_ids_is_not_mistaken_for_those_gathered() -> None:
    made = HostStore(8, (4,), torch.float32, GPU)
    made.load(torch.arange(8.0).view(8, 1).expand(8, 4).contiguous())
    ids = torch.tensor([1, 2])
    made.prefetch(ids)
    ids.fill_(5)
    assert made.gather(torch.tensor([2, 1]))[:, 0].tolist() == [2, 1]
    made.prefetch(torch.tensor([3]))
    made.load(torch.full((8, 4), 9.0))
    assert made.gather(torch.tensor([3]))[:, 0].tolist() == [9]
    made.scatter(torch.tensor([99]), torch.zeros(1, 4, device=GPU))  # an error behind the scenes
    with pytest.raises(IndexError):
        made.tensor()
    made.close()


def test_a_gpu_keeps_a_reserve_for_the_training(tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    assert free_space(GPU, tmp_path).device <= free - 0.29 * total
