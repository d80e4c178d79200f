"""All kinds of store keep the same promise and take the bytes that were forecast; files leave nothing behind."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import parlay
import problems
from parlay.engine.world import World
from parlay.errors import InputError
from parlay.stores import DTYPES, KINDS, Free, Store, free_space, make_store, place, placement, store_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SAMPLES, SHAPE = 20, (3, 2, 2)
kinds = pytest.mark.parametrize("kind", KINDS)


def values_of(ids: Tensor, base: float = 0.0) -> Tensor:
    """A tensor of its own for every sample, exact in all the dtypes of stores."""
    return (ids + base).reshape(-1, 1, 1, 1).expand(-1, *SHAPE).float()


@pytest.fixture(params=[*zip(KINDS, DTYPES, strict=True), ("host", "float32")], ids="-".join)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind, dtype = request.param
    made = make_store(kind, SAMPLES, SHAPE, DTYPES[dtype], CPU, tmp_path / "states-1.bin")
    assert made.bytes == store_bytes(SAMPLES, [SHAPE], DTYPES[dtype], multipliers=False)
    yield made
    made.close()
    assert made.bytes == 0


def test_what_is_scattered_by_id_is_gathered_by_id(store: Store) -> None:
    content = store.tensor()
    assert not content.any()
    assert store.gather(torch.arange(SAMPLES)).dtype == store.dtype == content.dtype
    store.scatter(torch.tensor([4]), values_of(torch.tensor([4])))
    assert content.sum() == content[4].sum() == 4 * 12  # the whole content is seen without a copy
    for ids in torch.split(torch.randperm(SAMPLES), 6):
        store.scatter(ids, values_of(ids).contiguous(memory_format=torch.channels_last))
    ids = torch.tensor([17, 3, 3, 0])
    assert torch.equal(store.gather(ids), values_of(ids).to(store.dtype))
    store.gather(ids).fill_(7)  # a batch is the caller's own
    assert torch.equal(store.tensor(), values_of(torch.arange(SAMPLES)).to(store.dtype))
    store.prefetch(ids)
    store.scatter(ids[:1], values_of(ids[:1], 1))
    assert store.gather(ids)[:, 0, 0, 0].tolist() == [18, 3, 3, 0]
    with pytest.raises(IndexError):
        store.gather(torch.tensor([SAMPLES]))
    with pytest.raises(IndexError):
        store.scatter(torch.tensor([SAMPLES]), values_of(ids[:1]))


def test_values_are_rounded_to_the_dtype_and_carry_no_graph(store: Store) -> None:
    ids, values = torch.tensor([1, 2]), torch.full((2, *SHAPE), 1 / 3, dtype=torch.float64, requires_grad=True)
    store.scatter(ids, values)
    assert torch.equal(store.gather(ids), values.detach().to(store.dtype))
    assert not store.gather(ids).requires_grad


def test_a_saved_content_is_loaded_and_one_of_another_shape_or_dtype_refused(store: Store) -> None:
    content = torch.randn(SAMPLES, *SHAPE).to(store.dtype)
    store.load(content)
    assert torch.equal(store.tensor(), content)
    assert torch.equal(store.gather(torch.tensor([7])), content[7:8])
    for wrong, told in ((content[1:], r"\(19, 3, 2, 2\)"), (content.double(), r"torch\.float64")):
        with pytest.raises(InputError, match=told):
            store.load(wrong)


@kinds
def test_samples_may_be_vectors_and_impossible_stores_are_refused(kind: str, tmp_path: Path) -> None:
    for samples, dtype, told in ((0, torch.float32, "not empty"), (1, torch.int8, "float32, bfloat16, float16")):
        with pytest.raises(InputError, match=told):
            make_store(kind, samples, SHAPE, dtype, CPU, tmp_path / "s")
    with pytest.raises(InputError, match="write one of device, host, file"):
        make_store("tape", 1, SHAPE, torch.float32, CPU, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    made = make_store(kind, 4, (5,), torch.float32, CPU, tmp_path / "s")
    made.scatter(torch.tensor([3]), torch.ones(1, 5))
    assert made.gather(torch.tensor([0, 3])).sum(1).tolist() == [0, 5]


@pytest.mark.parametrize(
    ("shapes", "penalty", "augmented_lagrangian"),
    [
        ([(32, 16, 16)], 1.53, 3.05),  # ResNet-110, K = 2
        ([(16, 32, 32), (32, 16, 16)], 4.58, 9.16),  # K = 3
        ([(32, 8, 8)], 0.38, 0.76),  # the same, downsampled
        ([(16, 16, 16), (32, 8, 8)], 1.14, 2.29),
        ([(160, 32, 32), (320, 16, 16)], 45.78, 91.55),  # WRN-40-10, K = 3
        ([(160, 16, 16), (320, 8, 8)], 11.44, 22.89),
    ],
)
def test_the_bytes_are_those_of_the_papers_tables(
    shapes: list[tuple[int, ...]], penalty: float, augmented_lagrangian: float
) -> None:
    for multipliers, gib in ((False, penalty), (True, augmented_lagrangian)):
        single, half = (store_bytes(50_000, shapes, DTYPES[d], multipliers) for d in ("float32", "bfloat16"))
        assert round(single / 2**30, 2) == gib
        assert 2 * half == single


# Which kind fits


def test_the_first_place_that_fits_is_taken() -> None:
    for kind, free, chosen in (
        ("auto", Free(device=100, host=100, disk=100), "device"),
        ("auto", Free(device=99, host=100, disk=100), "host"),
        ("auto", Free(device=0, host=0, disk=100), "file"),
        ("file", Free(device=100, host=100, disk=100), "file"),
    ):
        assert place(kind, 100, CPU, Path("out"), free=free) == chosen


@pytest.mark.parametrize(
    ("kind", "free", "advice"),
    [
        ("device", Free(99, 100, 0), r"write --store host, or --store-dtype bfloat16 \(half of .*, or --downsample 2"),
        ("device", Free(0, 0, 100), "write --store file$"),
        ("auto", Free(25, 25, 25), r"write --downsample 2 \(a quarter\)$"),
        ("auto", Free(13, 0, 0), "write --store auto --store-dtype bfloat16 --downsample 2 "),
        ("auto", Free(1, 2, 3), "write --method serial, which stores no states"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line_with_what_would(kind: str, free: Free, advice: str) -> None:
    with pytest.raises(InputError, match=advice) as caught:
        place(kind, 100, CPU, Path("out"), free=free)
    assert "\n" not in str(caught.value)
    assert all(f"{count} bytes" in str(caught.value) for count in (100, free.device, free.host, free.disk))


def test_processes_of_one_host_share_its_memory_and_each_has_its_own_gpu() -> None:
    """Each needs 100 bytes, all together 300."""
    for device, free, chosen in (
        *((CPU, Free(250, 250, 300), "file"), (CPU, Free(300, 300, 0), "device")),
        *((GPU, Free(100, 0, 0), "device"), (GPU, Free(99, 250, 300), "file"), (GPU, Free(99, 300, 0), "host")),
    ):
        assert place("auto", 100, device, Path("out"), together=300, free=free) == chosen
    assert place("host", 100, CPU, Path("out"), free=Free(250, 250, 250)) == "host"
    with pytest.raises(InputError, match="do not fit"):
        place("host", 100, CPU, Path("out"), together=300, free=Free(250, 250, 250))


@pytest.mark.parametrize(("processes", "kind"), [(1, "device"), (3, "file")])
def test_an_engine_counts_the_stores_of_all_processes_of_its_host(
    processes: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed, data = 9 * 2 * 8 * 4 * 2, problems.images(9)
    monkeypatch.setattr(World, "on_this_host", lambda self, amount: processes * amount)  # noqa: ARG005
    monkeypatch.setattr(placement, "free_space", lambda *_: Free(2 * needed, 2 * needed, 9 * needed))
    cut = parlay.partition(problems.dense(), 3, data[0])
    running = problems.engine(cut, data, parlay.AugmentedLagrangian(), folder=tmp_path)
    assert running.auxiliary_bytes == needed
    assert {type(store).__name__.lower() for link in running.own.links for store in link.stores()} == {f"{kind}store"}


def test_free_space_is_found_where_no_folder_is_yet_and_limits_of_control_groups_count(tmp_path: Path) -> None:
    free = free_space(CPU, tmp_path / "not" / "yet")
    assert free.device == free.host > 0
    assert free.disk > 0
    inner = tmp_path / "jobs" / "mine"
    inner.mkdir(parents=True)
    for group, limit, used, cache in ((inner, "max", 50, 10), (inner.parent, "1000", 900, 300)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    (tmp_path / "cgroup").write_text("0::/jobs/mine\n")
    assert placement._cgroup_rooms(tmp_path, tmp_path / "cgroup") == [1000 - 900 + 300]
    assert placement._cgroup_rooms(tmp_path, tmp_path / "missing") == []


# Files


def file(path: Path, samples: int = 3) -> Store:
    return make_store("file", samples, (2,), torch.float32, CPU, path)


def test_files_go_when_their_stores_are_closed_and_the_folder_with_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "stores"
    made = [file(folder / name) for name in ("states-1", "multipliers-1")]
    content = made[0].tensor()
    made[0].close()
    assert [path.name for path in folder.iterdir()] == ["multipliers-1"]
    assert not content.any()  # a view that is still held stays readable
    (folder / "states-1").write_text("of a later run")
    made[0].close()
    assert (folder / "states-1").read_text() == "of a later run"
    shutil.rmtree(folder)  # what is gone already is no error
    made[1].close()
    file(folder / "states-1").close()
    assert list((tmp_path / "run").iterdir()) == []


def test_an_older_store_is_replaced_by_a_fresh_one_and_any_other_file_is_left_alone(tmp_path: Path) -> None:
    file(tmp_path / "s", samples=9).tensor().fill_(1)  # of a run that was killed
    assert not file(tmp_path / "s").tensor().any()
    assert (tmp_path / "s").stat().st_size == 4096 + 3 * 2 * 4
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="left alone"):
        file(tmp_path / "thesis.txt")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_full_disk_is_one_line_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"states-1 needs 12,096 bytes [^\n]*$"):
        file(tmp_path / "states-1", samples=1000)
    assert list(tmp_path.iterdir()) == []
