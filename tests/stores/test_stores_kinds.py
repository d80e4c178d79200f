"""All kinds of store keep the same promise, and take the bytes that were forecast."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay.errors import InputError
from parlay.stores import DTYPES, KINDS, Store, make_store, store_bytes

CPU = torch.device("cpu")
SAMPLES, SHAPE = 20, (3, 2, 2)
GIB = 2**30
kinds = pytest.mark.parametrize("kind", KINDS)


def values_of(ids: Tensor, base: float = 0.0) -> Tensor:
    """A tensor of its own for every sample, exact in all the dtypes of stores."""
    return (ids + base).reshape(-1, 1, 1, 1).expand(-1, *SHAPE).float()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind, dtype = request.param
    made = make_store(kind, SAMPLES, SHAPE, DTYPES[dtype], CPU, tmp_path / "interface-1.store")
    yield made
    made.close()


every_store = pytest.mark.parametrize(
    "store", [(kind, dtype) for kind in KINDS for dtype in DTYPES], indirect=True, ids=lambda pair: "-".join(pair)
)


@every_store
def test_a_store_starts_with_zeros_in_its_dtype(store: Store) -> None:
    batch = store.gather(torch.arange(SAMPLES))
    assert batch.shape == (SAMPLES, *SHAPE)
    assert batch.dtype == store.dtype
    assert batch.device == CPU
    assert not batch.any()


@every_store
def test_what_is_scattered_by_id_is_gathered_by_id(store: Store) -> None:
    for ids in torch.split(torch.randperm(SAMPLES), 6):
        store.scatter(ids, values_of(ids))
    ids = torch.tensor([17, 3, 3, 0])
    assert torch.equal(store.gather(ids), values_of(ids).to(store.dtype))


@every_store
def test_a_scatter_leaves_other_samples_alone(store: Store) -> None:
    store.scatter(torch.tensor([4]), values_of(torch.tensor([4])))
    others = torch.tensor([i for i in range(SAMPLES) if i != 4])
    assert not store.gather(others).any()


@every_store
def test_a_scatter_after_a_prefetch_of_the_same_ids_is_seen(store: Store) -> None:
    ids = torch.tensor([5, 2, 9])
    store.prefetch(ids)
    store.scatter(ids[:1], values_of(ids[:1], 1))
    assert store.gather(ids)[:, 0, 0, 0].tolist() == [6, 0, 0]


@every_store
def test_values_are_rounded_to_the_dtype_and_carry_no_graph(store: Store) -> None:
    ids = torch.tensor([1, 2])
    values = torch.full((2, *SHAPE), 1 / 3, dtype=torch.float64, requires_grad=True)
    store.scatter(ids, values)
    assert torch.equal(store.gather(ids), values.detach().to(store.dtype))
    assert not store.gather(ids).requires_grad


@every_store
def test_a_gathered_batch_is_the_callers_own(store: Store) -> None:
    store.gather(torch.tensor([1, 2])).fill_(7)
    assert not store.tensor().any()


@every_store
def test_channels_last_values_arrive_in_the_right_places(store: Store) -> None:
    ids = torch.arange(4)
    values = torch.arange(4.0 * 12).reshape(4, *SHAPE)
    store.scatter(ids, values.contiguous(memory_format=torch.channels_last))
    assert torch.equal(store.gather(ids), values.to(store.dtype))


@every_store
def test_it_holds_exactly_the_bytes_of_its_elements(store: Store) -> None:
    assert store.bytes == SAMPLES * 12 * store.dtype.itemsize
    store.close()
    assert store.bytes == 0


@every_store
def test_the_whole_content_is_seen_without_a_copy(store: Store) -> None:
    content = store.tensor()
    store.scatter(torch.tensor([4]), values_of(torch.tensor([4])))
    assert content.sum() == content[4].sum() == 4 * 12


@every_store
def test_a_saved_content_loads_into_another_store(store: Store) -> None:
    content = torch.randn(SAMPLES, *SHAPE).to(store.dtype)
    store.load(content)
    assert torch.equal(store.tensor(), content)
    assert torch.equal(store.gather(torch.tensor([7])), content[7:8])


@every_store
def test_a_content_of_another_shape_or_dtype_is_refused(store: Store) -> None:
    with pytest.raises(InputError, match=r"\(19, 3, 2, 2\)"):
        store.load(torch.zeros(SAMPLES - 1, *SHAPE, dtype=store.dtype))
    with pytest.raises(InputError, match=r"torch\.float64"):
        store.load(torch.zeros(SAMPLES, *SHAPE, dtype=torch.float64))


@kinds
def test_an_id_beyond_the_samples_is_an_error_and_not_a_wrong_tensor(kind: str, tmp_path: Path) -> None:
    made = make_store(kind, SAMPLES, SHAPE, torch.float32, CPU, tmp_path / "s")
    with pytest.raises(IndexError):
        made.gather(torch.tensor([SAMPLES]))
    with pytest.raises(IndexError):
        made.scatter(torch.tensor([SAMPLES]), torch.zeros(1, *SHAPE))


@kinds
def test_an_empty_data_set_and_unknown_dtypes_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not empty"):
        make_store(kind, 0, SHAPE, torch.float32, CPU, tmp_path / "s")
    with pytest.raises(InputError, match="write one of float32, bfloat16, float16"):
        make_store(kind, 1, SHAPE, torch.int8, CPU, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


@kinds
def test_samples_may_be_vectors(kind: str, tmp_path: Path) -> None:
    made = make_store(kind, 4, (5,), torch.float32, CPU, tmp_path / "s")
    made.scatter(torch.tensor([3]), torch.ones(1, 5))
    assert made.gather(torch.tensor([0, 3])).sum(1).tolist() == [0, 5]


def test_an_unknown_kind_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="write one of device, host, file"):
        make_store("tape", 1, SHAPE, torch.float32, CPU, tmp_path / "s")


R110_K2, R110_K3 = [(32, 16, 16)], [(16, 32, 32), (32, 16, 16)]
WRN_K3 = [(160, 32, 32), (320, 16, 16)]
WRN_K3_R2 = [(160, 16, 16), (320, 8, 8)]


@pytest.mark.parametrize(
    ("shapes", "penalty", "augmented_lagrangian"),
    [
        (R110_K2, 1.53, 3.05),
        (R110_K3, 4.58, 9.16),
        ([(32, 8, 8)], 0.38, 0.76),
        ([(16, 16, 16), (32, 8, 8)], 1.14, 2.29),
        (WRN_K3, 45.78, 91.55),
        (WRN_K3_R2, 11.44, 22.89),
    ],
)
def test_the_bytes_are_those_of_the_papers_tables(
    shapes: list[tuple[int, ...]], penalty: float, augmented_lagrangian: float
) -> None:
    for multipliers, gib in ((False, penalty), (True, augmented_lagrangian)):
        assert round(store_bytes(50_000, shapes, torch.float32, multipliers) / GIB, 2) == gib
        assert store_bytes(50_000, shapes, torch.bfloat16, multipliers) * 2 == store_bytes(
            50_000, shapes, torch.float32, multipliers
        )


@kinds
def test_the_forecast_is_what_the_stores_hold(kind: str, tmp_path: Path) -> None:
    made = [make_store(kind, 9, shape, torch.bfloat16, CPU, tmp_path / str(shape)) for shape in ((2, 3), (5,))]
    assert sum(one.bytes for one in made) == store_bytes(9, [(2, 3), (5,)], torch.bfloat16, multipliers=False)
