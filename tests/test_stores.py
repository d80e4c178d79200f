"""All kinds of store keep the same promise; files are checked before they are believed; what does not fit is said."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parlay import stores
from parlay.errors import InputError
from parlay.stores import DTYPES, KINDS, FileStore, Free, HostStore, Store, free_space, make_store, place, store_bytes

CPU = torch.device("cpu")
SAMPLES, SHAPE = 20, (3, 2, 2)
GIB = 2**30
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
kinds = pytest.mark.parametrize("kind", KINDS)


def values_of(ids: Tensor, base: float = 0.0) -> Tensor:
    """A tensor of its own for every sample, exact in all the dtypes of stores."""
    return (ids + base).reshape(-1, 1, 1, 1).expand(-1, *SHAPE).float()


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    kind, dtype = request.param
    made = make_store(kind, SAMPLES, SHAPE, DTYPES[dtype], CPU, tmp_path / "interface-1.store", tag="run")
    yield made
    made.close()


every_store = pytest.mark.parametrize(
    "store", [(kind, dtype) for kind in KINDS for dtype in DTYPES], indirect=True, ids=lambda pair: "-".join(pair)
)


# --- every kind ---


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
    store.fill(2.0)
    assert torch.equal(content, torch.full((SAMPLES, *SHAPE), 2.0, dtype=store.dtype))


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


# --- bytes ---

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


# --- files ---


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "interface-1.store"
    made = FileStore.create(path, SAMPLES, SHAPE, torch.bfloat16, CPU, tag="run-1")
    made.fill(1.5)
    made.close()
    return path


def reopen(path: Path, **changes: object) -> FileStore:
    wanted: dict[str, object] = {"samples": SAMPLES, "shape": SHAPE, "dtype": torch.bfloat16, "tag": "run-1"}
    return FileStore.open(path, device=CPU, **(wanted | changes))  # type: ignore[arg-type]


def test_a_file_is_found_again_with_its_content(file: Path) -> None:
    assert torch.equal(reopen(file).tensor(), torch.full((SAMPLES, *SHAPE), 1.5, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"samples": 21}, "has samples 20, not 21"),
        ({"shape": (3, 4)}, r"has shape \(3, 2, 2\), not \(3, 4\)"),
        ({"dtype": torch.float16}, "has dtype 'bfloat16', not 'float16'"),
        ({"tag": "run-2"}, "has tag 'run-1', not 'run-2'"),
    ],
)
def test_a_file_of_something_else_is_refused_by_its_header(
    file: Path, changes: dict[str, object], difference: str
) -> None:
    with pytest.raises(InputError, match=f"{file}.*{difference}"):
        reopen(file, **changes)


@pytest.mark.parametrize("size", [0, 10, 4095, 4096, 4096 + SAMPLES * 24 - 1, 4096 + SAMPLES * 24 + 1])
def test_a_file_cut_short_or_grown_is_refused_and_not_mended(file: Path, size: int) -> None:
    os.truncate(file, size)
    with pytest.raises(InputError, match=str(file)):
        reopen(file)
    assert file.stat().st_size == size


def test_a_header_with_a_flipped_byte_is_refused(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    for position in (0, 15, 30, 60):
        damaged = raw.copy()
        damaged[position] ^= 0x80
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=str(file)):
            reopen(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no store"):
        reopen(tmp_path / "nothing")


def test_a_store_is_replaced_by_a_fresh_one_of_any_shape(file: Path) -> None:
    made = make_store("file", 3, (2,), torch.float32, CPU, file, tag="run-2")
    assert not made.tensor().any()
    assert file.stat().st_size == 4096 + 3 * 2 * 4
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_file_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    with pytest.raises(InputError, match="left alone"):
        make_store("file", 3, (2,), torch.float32, CPU, path)
    assert path.read_text() == "years of work"


def test_a_tag_that_does_not_fit_the_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shorter"):
        make_store("file", 3, (2,), torch.float32, CPU, tmp_path / "s", tag="x" * 5000)


def test_a_full_disk_is_one_line_before_training_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    path = tmp_path / "runs" / "interface-1.store"
    with pytest.raises(InputError, match=f"{path} needs 28,096 bytes") as caught:
        make_store("file", 1000, SHAPE, torch.bfloat16, CPU, path)
    assert "\n" not in str(caught.value)
    assert list(path.parent.iterdir()) == []


FULL_TMPFS = """
import sys, torch
from pathlib import Path
from parlay.errors import InputError
from parlay.stores import make_store
folder = Path(sys.argv[1])
make = lambda samples: make_store("file", samples, (1024,), torch.float32, torch.device("cpu"), folder / "s")
try:
    make(1024)
except InputError as error:
    assert "4,198,400 bytes" in str(error), error
    assert list(folder.iterdir()) == [], "something was left behind"
    make(64).fill(1)
    print("refused, then a smaller one fits")
"""


def test_a_disk_that_is_really_full_gives_the_line_and_no_sigbus(tmp_path: Path) -> None:
    namespace = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs "$1" || exit 77; shift; exec "$@"', "sh"]
    python = [sys.executable, "-c", FULL_TMPFS, str(tmp_path)]
    try:
        probe = subprocess.run([*namespace, str(tmp_path), "true"], capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare command")
    if probe.returncode:
        pytest.skip("mount namespaces are not allowed here")
    run = subprocess.run([*namespace, str(tmp_path), *python], capture_output=True, text=True, check=False)
    assert run.stdout == "refused, then a smaller one fits\n", run.stderr


# --- where they fit ---


@pytest.mark.parametrize(
    ("kind", "free", "chosen"),
    [
        ("auto", Free(device=100, host=100, disk=100), "device"),
        ("auto", Free(device=99, host=100, disk=100), "host"),
        ("auto", Free(device=0, host=0, disk=100), "file"),
        ("device", Free(device=100, host=0, disk=0), "device"),
        ("host", Free(device=100, host=100, disk=0), "host"),
        ("file", Free(device=100, host=100, disk=100), "file"),
    ],
)
def test_the_first_place_that_fits_is_taken(kind: str, free: Free, chosen: str) -> None:
    assert place(kind, 100, CPU, Path("out"), free) == chosen


@pytest.mark.parametrize(
    ("kind", "free", "advice"),
    [
        ("device", Free(99, 100, 0), "write store host, or bfloat16"),
        ("device", Free(0, 0, 100), "write store file, or bfloat16"),
        ("host", Free(0, 99, 99), r"write bfloat16 states \(half of float32\), or downsample 2 \(a quarter\)$"),
        ("auto", Free(25, 25, 25), r"write downsample 2 \(a quarter\)$"),
        ("auto", Free(13, 0, 0), "write bfloat16 states with downsample 2"),
        ("auto", Free(1, 2, 3), "write method replay, which stores no states"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line_with_what_would(kind: str, free: Free, advice: str) -> None:
    with pytest.raises(InputError, match=advice) as caught:
        place(kind, 100, CPU, Path("out"), free)
    line = str(caught.value)
    assert "\n" not in line
    for count in (100, free.device, free.host, free.disk):
        assert f"{count} bytes" in line


def test_an_unknown_place_is_refused_with_those_that_exist() -> None:
    with pytest.raises(InputError, match="write one of auto, device, host, file"):
        place("tape", 1, CPU, Path("out"), Free(1, 1, 1))


def test_free_space_is_found_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    free = free_space(CPU, tmp_path / "not" / "yet")
    assert free.device == free.host > 0
    assert free.disk > 0


def test_the_limit_of_a_control_group_counts_and_so_does_that_of_the_one_above(tmp_path: Path) -> None:
    inner = tmp_path / "jobs" / "mine"
    inner.mkdir(parents=True)
    for group, limit, used, cache in ((inner, "max", 50, 10), (inner.parent, "1000", 900, 300)):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")
    own = tmp_path / "cgroup"
    own.write_text("0::/jobs/mine\n")
    assert stores._cgroup_rooms(tmp_path, own) == [1000 - 900 + 300]
    assert stores._cgroup_rooms(tmp_path, tmp_path / "missing") == []


# --- between host and GPU ---


@pytest.mark.cuda
@needs_cuda
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


@pytest.mark.cuda
@needs_cuda
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


@pytest.mark.cuda
@needs_cuda
def test_a_prefetch_of_other_ids_is_not_mistaken_for_those_gathered() -> None:
    made = HostStore(8, (4,), torch.float32, torch.device("cuda"))
    made.load(torch.arange(8.0).view(8, 1).expand(8, 4).contiguous())
    ids = torch.tensor([1, 2])
    made.prefetch(ids)
    ids.fill_(5)
    assert made.gather(torch.tensor([2, 1]))[:, 0].tolist() == [2, 1]
    assert made.gather(torch.tensor([1, 2]))[:, 0].tolist() == [1, 2]
    made.prefetch(torch.tensor([3]))
    made.fill(9)
    assert made.gather(torch.tensor([3]))[:, 0].tolist() == [9]
    made.close()


@pytest.mark.cuda
@needs_cuda
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


@pytest.mark.cuda
@needs_cuda
def test_values_that_are_overwritten_after_a_scatter_arrive_as_they_were() -> None:
    made = HostStore(32, (512, 512), torch.float32, torch.device("cuda"))
    values = torch.empty(32, 512, 512, device="cuda")
    for step in range(5):
        values.fill_(step)
        made.scatter(torch.arange(32), values)
        values.fill_(-1)
        assert bool((made.tensor() == step).all())
    made.close()


@pytest.mark.cuda
@needs_cuda
def test_an_error_behind_the_scenes_comes_out_at_the_next_call() -> None:
    made = HostStore(8, (4,), torch.float32, torch.device("cuda"))
    made.scatter(torch.tensor([99]), torch.zeros(1, 4, device="cuda"))
    with pytest.raises(IndexError):
        made.tensor()
    made.close()


@pytest.mark.cuda
@needs_cuda
def test_ids_may_come_on_the_gpu(tmp_path: Path) -> None:
    for kind in KINDS:
        made = make_store(kind, 8, (4,), torch.bfloat16, torch.device("cuda"), tmp_path / "s")
        ids = torch.tensor([1, 2], device="cuda")
        made.prefetch(ids)
        made.scatter(ids, torch.ones(2, 4, device="cuda"))
        assert made.gather(ids).dtype == torch.bfloat16
        assert made.gather(torch.arange(8))[:, 0].tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
        made.close()


@pytest.mark.cuda
@needs_cuda
def test_a_gpu_keeps_a_reserve_for_the_training(tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    assert free_space(torch.device("cuda"), tmp_path).device <= free - 0.29 * total
