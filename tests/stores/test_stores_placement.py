"""The first place that fits is taken; what does not fit is said, with what would."""

from pathlib import Path

import pytest
import torch

from parlay.errors import InputError
from parlay.stores import Free, free_space, place, placement

CPU = torch.device("cpu")


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
        (
            "device",
            Free(99, 100, 0),
            r"write --store host, or --store-dtype bfloat16 \(half of float32\), or --downsample 2",
        ),
        ("device", Free(0, 0, 100), "write --store file$"),
        (
            "host",
            Free(0, 99, 99),
            r"write --store-dtype bfloat16 \(half of float32\), or --downsample 2 \(a quarter\)$",
        ),
        ("auto", Free(25, 25, 25), r"write --downsample 2 \(a quarter\)$"),
        ("auto", Free(13, 0, 0), "write --store auto --store-dtype bfloat16 --downsample 2 "),
        ("device", Free(0, 99, 0), "write --store auto --store-dtype bfloat16 --downsample 2 "),
        ("auto", Free(1, 2, 3), "write --method serial, which stores no states"),
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
    assert placement._cgroup_rooms(tmp_path, own) == [1000 - 900 + 300]
    assert placement._cgroup_rooms(tmp_path, tmp_path / "missing") == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_keeps_a_reserve_for_the_training(tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    assert free_space(torch.device("cuda"), tmp_path).device <= free - 0.29 * total
