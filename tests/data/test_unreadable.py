"""Samples that cannot be read: named or skipped, in any data set with an index."""

import errno

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from hpctrain.data import SkipUnreadable
from hpctrain.errors import DataError, UsageError

INSTEAD = torch.zeros(3, 8, 8, dtype=torch.uint8), -100


@pytest.fixture
def folder(tmp_path):
    """Six images of two classes; the second of each class is damaged: truncated, or no image."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            grey = Image.new("RGB", (20, 20), (50 * number,) * 3)
            grey.save(tmp_path / name / f"{number}.jpg")
    whole = (tmp_path / "cat" / "1.jpg").read_bytes()
    (tmp_path / "cat" / "1.jpg").write_bytes(whole[:-20])
    (tmp_path / "dog" / "1.jpg").write_bytes(b"<html>not found</html>")
    return tmp_path


@pytest.fixture
def images(folder):
    return ImageFolder(folder, v2.Compose([v2.PILToTensor(), v2.Resize((8, 8))]))


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_image_is_an_error_with_its_path(folder, images, workers):
    try:
        list(DataLoader(SkipUnreadable(images), 6, num_workers=workers))
    except DataError as raised:
        error = raised.with_traceback(None)  # the traceback keeps the loader's processes alive
    assert error.code == "HT517"
    assert error.found.startswith(f"{folder}/cat/1.jpg cannot be read: OSError: ")
    assert error.fixes[1].startswith("SkipUnreadable(…, limit=10) (--max-unreadable 10 ")
    assert "Traceback" not in str(error)


def test_unreadable_images_up_to_the_limit_are_skipped_and_named_once(images, folder, caplog):
    dataset = SkipUnreadable(images, 2, INSTEAD)
    for _ in range(3):
        ((pixels, targets),) = DataLoader(dataset, 6)
        assert targets.tolist() == [0, -100, 0, 1, -100, 1]
        assert pixels[[1, 4]].count_nonzero() == 0
        assert abs(pixels[2].float().mean() - 100) < 3
    named = [record.args[0] for record in caplog.records]
    assert named == [f"{folder}/cat/1.jpg", f"{folder}/dog/1.jpg"]


def test_more_unreadable_images_than_the_limit_are_an_error(images, folder):
    dataset = SkipUnreadable(images, 1, INSTEAD)
    assert dataset[1] is INSTEAD
    with pytest.raises(DataError, match="1 other samples before it") as caught:
        dataset[4]
    assert f"{folder}/dog/1.jpg" in caught.value.found
    assert caught.value.expected == "at most 1 such samples in the whole data set"
    assert dataset[1] is INSTEAD  # still, as it has been counted


def test_unreadable_image_of_a_subset_has_its_path(images, folder):
    with pytest.raises(DataError, match=r"dog/1\.jpg"):
        SkipUnreadable(Subset(Subset(images, [5, 4, 3]), [2, 1]))[1]


class Fails(Dataset):
    """Data set without paths, with one kind of error."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise self.error


def test_unreadable_sample_without_a_path_has_its_index():
    with pytest.raises(DataError, match="sample 2 of Fails cannot be read: ValueError: odd"):
        SkipUnreadable(Fails(ValueError("odd")))[2]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error", "x.jpg"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "x.jpg"),
        MemoryError(),
        UsageError.of_text("HT001", "no", "yes"),
    ],
)
def test_missing_files_failing_disks_and_own_errors_are_never_skipped(error):
    with pytest.raises(type(error)) as caught:
        SkipUnreadable(Fails(error), 3, INSTEAD)[0]
    assert caught.value is error


def test_skipping_data_set_is_as_random_as_the_one_inside(images):
    assert SkipUnreadable(images).random
    assert not SkipUnreadable(TensorDataset(torch.ones(2))).random
    assert len(SkipUnreadable(images)) == 6
