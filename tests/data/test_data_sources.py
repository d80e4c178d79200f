"""Named data sets: every published layout is read exactly, and every broken file is named and refused."""

import gzip
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from published_files import (
    dump_python2,
    idx,
    images,
    write_cifar10_binary,
    write_cifar10_python,
    write_cifar100_binary,
    write_cifar100_python,
    write_mnist,
)

from parlay.data import Synthetic, check, facts, load
from parlay.errors import InputError

ROW = 3 * 32 * 32


@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist", "."])
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
def test_mnist_is_read_from_each_folder_plain_and_compressed(tmp_path: Path, folder: str, compressed: bool) -> None:
    written = write_mnist(tmp_path / folder, compressed=compressed)
    data = load("mnist", tmp_path)
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.targets.dtype == torch.int64
    assert torch.equal(data.train.inputs[:, 0], torch.from_numpy(written["train-images-idx3-ubyte"]))
    assert data.train.targets.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(data.test.inputs[:, 0], torch.from_numpy(written["t10k-images-idx3-ubyte"]))
    assert (data.facts.train_size, data.facts.test_size) == (6, 4)


CIFAR = [
    ("cifar10", "cifar-10-batches-py", write_cifar10_python),
    ("cifar10", "cifar-10-batches-bin", write_cifar10_binary),
    ("cifar100", "cifar-100-python", write_cifar100_python),
    ("cifar100", "cifar-100-binary", write_cifar100_binary),
]


@pytest.mark.parametrize(("name", "folder", "write"), CIFAR)
@pytest.mark.parametrize("inside", [False, True], ids=["data-dir-above", "data-dir-itself"])
def test_cifar_is_read_from_pickles_and_binary_files(tmp_path: Path, name, folder, write, inside) -> None:
    rows, labels = write(tmp_path / folder)
    data = load(name, tmp_path / folder if inside else tmp_path)
    assert data.train.inputs.shape == (len(rows), 3, 32, 32)
    assert data.train.inputs.dtype == torch.uint8
    assert torch.equal(data.train.inputs.reshape(-1, ROW), torch.from_numpy(rows))
    assert data.train.targets.tolist() == labels
    assert data.train.targets.dtype == torch.int64


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_python_3_are_read_in_every_protocol(tmp_path: Path, protocol: int) -> None:
    rows, _ = write_cifar100_python(tmp_path)
    for order in "CF":
        saved = {b"data": np.asarray(rows, order=order), "fine_labels": np.arange(len(rows))}
        (tmp_path / "train").write_bytes(pickle.dumps(saved, protocol=protocol))
        data = load("cifar100", tmp_path)
        assert torch.equal(data.train.inputs.reshape(-1, ROW), torch.from_numpy(rows))
        assert data.train.targets.tolist() == list(range(len(rows)))


def test_digits_are_split_1437_to_360_with_every_class_in_proportion() -> None:
    data = load("digits")
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert data.train.inputs.shape[1:] == (1, 8, 8)
    assert data.train.inputs.dtype == torch.uint8
    assert int(data.train.inputs.max()) == 240
    whole = data.train.targets.bincount() + data.test.targets.bincount()
    assert ((data.test.targets.bincount() - whole / 5).abs() < 1).all()


def test_synthetic_images_have_the_asked_shape_and_classes() -> None:
    asked = Synthetic(shape=(2, 5, 7), classes=3, train_size=11, test_size=4)
    data = load("synthetic", synthetic=asked)
    assert data.train.inputs.shape == (11, 2, 5, 7)
    assert data.train.inputs.dtype == torch.uint8
    assert sorted(data.train.targets.tolist()) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]
    assert data.facts == facts("synthetic", asked)


@pytest.mark.parametrize("wrong", [{"shape": (3, 0, 4)}, {"shape": (3, 4)}, {"classes": 0}, {"train_size": 0}])
def test_impossible_synthetic_data_is_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match="write"):
        Synthetic(**wrong)


@pytest.mark.parametrize("name", ["mnist", "cifar10", "cifar100"])
def test_missing_data_names_the_folder_and_the_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError) as refused:
        load(name, tmp_path / "nowhere")
    assert f"folder {tmp_path / 'nowhere'}" in str(refused.value)
    assert f"parlay data fetch {name} --data-dir {tmp_path / 'nowhere'}" in str(refused.value)


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    write_cifar10_python(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(InputError, match="cifar-10-batches-py/data_batch_3 is missing"):
        load("cifar10", tmp_path)


LABELS = "train-labels-idx1-ubyte"
IMAGES = "train-images-idx3-ubyte"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (IMAGES, idx(images(6, 28, 28))[:-1], "cut short"),
        (IMAGES, idx(images(6, 28, 28)) + b"x", "left over"),
        (IMAGES, idx(images(6, 28, 28))[:9], "cut short in its header"),
        (IMAGES, b"", "not an IDX file"),
        (IMAGES, b"\0\0\x0d\3" + idx(images(6, 28, 28))[4:], "not an IDX file"),
        (IMAGES, idx(images(6, 20, 20)), "20 x 20, not 28 x 28"),
        (IMAGES, idx(images(0, 28, 28)), "no samples"),
        (IMAGES, struct.pack(">HBB3I", 0, 8, 3, *[2**32 - 1] * 3) + b"x", "more than 268,435,456"),
        (IMAGES, idx(images(5, 28, 28)), "5 images, but 6 labels"),
        (LABELS, idx(np.array([0, 1, 2, 3, 4, 10])), "label 10 is out of range 0..9"),
        (LABELS, idx(images(6, 28, 28)), "not an IDX file of bytes in 1 dimensions"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
def test_a_malformed_idx_file_is_named_and_refused(tmp_path: Path, file, content, says, compressed) -> None:
    write_mnist(tmp_path, compressed=compressed)
    path = tmp_path / (f"{file}.gz" if compressed else file)
    path.write_bytes(gzip.compress(content) if compressed else content)
    with pytest.raises(InputError) as refused:
        load("mnist", tmp_path)
    assert says in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_compressed_file_that_is_honest_about_holding_gigabytes_is_not_read(tmp_path: Path) -> None:
    write_mnist(tmp_path, compressed=True)
    path = tmp_path / f"{IMAGES}.gz"
    header = struct.pack(">HBB3I", 0, 8, 3, 3_000_000, 28, 28)
    path.write_bytes(gzip.compress(header) + 40 * gzip.compress(bytes(1 << 20)))
    with pytest.raises(InputError, match=r"says 2,352,000,000 bytes .3000000 x 28 x 28., more than"):
        load("mnist", tmp_path)


def test_a_file_larger_than_any_published_one_is_not_read(tmp_path: Path) -> None:
    write_cifar10_binary(tmp_path)
    os.truncate(tmp_path / "data_batch_2.bin", 1 << 40)  # a file with a hole takes no space
    with pytest.raises(InputError, match=r"data_batch_2.bin: has 1,099,511,627,776 bytes, more than"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize("damage", [lambda whole: whole[:-20], lambda _: b"plain text", lambda _: b""])
def test_a_broken_gzip_file_is_named_and_refused(tmp_path: Path, damage) -> None:
    write_mnist(tmp_path, compressed=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InputError, match=f"{IMAGES}.gz: "):
        load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({b"data": images(3, 3072), b"labels": [0, 1]}, "3 images but 2 labels"),
        ({b"data": images(3, 3071), b"labels": [0, 1, 2]}, "rows of 3072"),
        ({b"data": images(3, 3072).astype(np.int64), b"labels": [0, 1, 2]}, "array of bytes"),
        ({b"data": images(3, 3072).tobytes(), b"labels": [0, 1, 2]}, "array of bytes"),
        ({b"data": images(0, 3072), b"labels": []}, "no samples"),
        ({b"data": images(3, 3072), b"labels": [0, 10, 2]}, "label 10 of sample 1 is out of range 0..9"),
        ({b"data": images(3, 3072), b"labels": [0, 1, -1]}, "label -1 of sample 2 is out of range"),
        ({b"data": images(3, 3072), b"labels": [0, 1, 2**70]}, "not a list of whole numbers"),
        ({b"data": images(3, 3072), b"labels": [0, 1, "2"]}, "not a list of whole numbers"),
        ({b"data": images(3, 3072), b"fine_labels": [0, 1, 2]}, "has no 'labels'"),
        ([1, 2], "holds a list"),
    ],
)
def test_a_malformed_cifar_pickle_is_named_and_refused(tmp_path: Path, content, says) -> None:
    write_cifar10_python(tmp_path)
    dump_python2(tmp_path / "data_batch_2", content)
    with pytest.raises(InputError) as refused:
        load("cifar10", tmp_path)
    assert says in str(refused.value)
    assert f"{tmp_path / 'data_batch_2'}: " in str(refused.value)


@pytest.mark.parametrize(
    ("name", "write", "file", "damage", "says"),
    [
        ("cifar10", write_cifar10_binary, "data_batch_4.bin", lambda b: b[:-1], "records of 3073"),
        ("cifar10", write_cifar10_binary, "data_batch_4.bin", lambda b: b + b"x", "records of 3073"),
        ("cifar10", write_cifar10_binary, "test_batch.bin", lambda _: b"", "0 bytes"),
        ("cifar10", write_cifar10_binary, "data_batch_1.bin", lambda b: b"\x0a" + b[1:], "label 10 of sample 0"),
        ("cifar100", write_cifar100_binary, "train.bin", lambda b: b[:-9], "records of 3074"),
        ("cifar100", write_cifar100_binary, "train.bin", lambda b: b"\x14" + b[1:], "label 20 of sample 0"),
        ("cifar100", write_cifar100_binary, "test.bin", lambda b: b"\0\x64" + b[2:], "out of range 0..99"),
    ],
)
def test_a_malformed_binary_file_is_named_and_refused(tmp_path: Path, name, write, file, damage, says) -> None:
    write(tmp_path)
    (tmp_path / file).write_bytes(damage((tmp_path / file).read_bytes()))
    with pytest.raises(InputError) as refused:
        load(name, tmp_path)
    assert says in str(refused.value)
    assert f"{tmp_path / file}: " in str(refused.value)
    assert f"parlay data fetch {name}" in str(refused.value)


def test_check_says_in_one_line_what_was_found(tmp_path: Path) -> None:
    write_cifar10_python(tmp_path / "cifar-10-batches-py", n=4)
    assert check("cifar10", tmp_path) == (
        "cifar10: 20 training and 4 test images of 3 x 32 x 32, 10 classes, "
        f"in {tmp_path / 'cifar-10-batches-py'} (published: 50000 and 10000)"
    )
    assert check("digits", tmp_path) == (
        "digits: 1437 training and 360 test images of 1 x 8 x 8, 10 classes, no files needed"
    )
