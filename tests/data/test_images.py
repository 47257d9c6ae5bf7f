"""Decoding, crops and normalisation against the references; errors for corrupt images."""

import io
import pickle
import struct
import sys
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2
from torchvision.transforms.functional import pil_to_tensor

from hpctrain import data
from hpctrain.arguments import Batches
from hpctrain.cluster.world import World
from hpctrain.data.feed import Placement
from hpctrain.data.images import decoding
from hpctrain.data.shards.writing import make
from hpctrain.errors import DataError, UsageError

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
import photographs as cuts

CPU = torch.device("cpu")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DECODERS = ("simplejpeg", "pillow")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory, lacking):
    folder = tmp_path_factory.mktemp("photographs")
    try:
        cuts.make(folder, train=3, val=2, classes=3)
    except FileNotFoundError as error:
        lacking("photographs", str(error))
    return folder


def encode(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gradient(width=64, height=48):
    """Return an image in which all regions differ."""
    down, across = numpy.mgrid[0:height, 0:width]
    bands = (across * 255 // width, down * 255 // height, (across + down) % 256)
    return Image.fromarray(numpy.stack(bands, -1).astype(numpy.uint8))


class Files:
    """A source of image files in memory."""

    def __init__(self, *files):
        self.files, self.classes, self.place = files, ["a", "b", "c"], "memory"

    def __len__(self):
        return len(self.files)

    def read(self, index):
        return self.files[index]

    def target(self, index):
        return index % 3

    def name(self, index):
        return f"memory/{index}.jpg"


GOOD = encode(gradient())
FILES = Files(GOOD)
TURNED = Image.Exif()
TURNED[0x0112] = 6  # Orientation
ODD = {
    "grey": encode(gradient().convert("L")),
    "CMYK": encode(gradient().convert("CMYK")),
    "progressive": encode(gradient(), progressive=True),
    "PNG named JPEG": encode(gradient(), "PNG"),
    "palette": encode(gradient().convert("P"), "PNG"),
    "transparent": encode(gradient().convert("RGBA"), "PNG"),
    "animated": encode(gradient(), "GIF", save_all=True, append_images=[gradient().rotate(180)]),
    "webp": encode(gradient(), "WEBP"),
    "bytes after its end": GOOD + b"junk",
    "extraneous bytes within": GOOD[:-2] + b"\0\0\0" + GOOD[-2:],
    "turned by EXIF": encode(gradient(), exif=TURNED),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_read_unusual_files_as_pillow_does(kind, name):
    decoder, file = decoding.find(name), ODD[kind]
    expected = pil_to_tensor(Image.open(io.BytesIO(file)).convert("RGB"))
    assert decoder.size(file) == (48, 64)
    image = decoder.decode(file)
    assert image.dtype == torch.uint8
    assert image.shape == (3, 48, 64)
    assert image.stride()[0] == 1, "channels last in memory"
    assert (image.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize("least", [(24, 32), (12, 16), (13, 16), (6, 8), (1, 1), (25, 32)])
def test_decoders_agree_on_a_reduced_size(least):
    one, other = (decoding.find(name).decode(GOOD, least) for name in DECODERS)
    assert torch.equal(one, other)
    part = next(n for n in (8, 4, 2, 1) if 48 // n >= least[0] and 64 // n >= least[1])
    assert one.shape == (3, 48 // part, 64 // part)


def test_image_set_can_be_pickled():
    images = pickle.loads(pickle.dumps(data.ImageSet(FILES, data.CenterCrop(32, 32))))
    assert torch.equal(images[0][0], data.ImageSet(FILES, data.CenterCrop(32, 32))[0][0])


def test_unknown_decoder_is_refused():
    with pytest.raises(UsageError, match="simplejpeg or pillow") as caught:
        decoding.find("opencv")
    assert caught.value.code == "HT516"


def test_decoder_falls_back_to_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    assert isinstance(decoding.find("auto"), decoding.Pillow)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match=r"pip install 'hpctrain\[vision\]'") as caught:
        decoding.find("auto")
    assert caught.value.code == "HT515"


def test_center_crop_of_photographs_equals_torchvision(photographs):
    source = data.image_source(photographs, "val")
    images = data.ImageSet(source, data.CenterCrop(224, resize=256))
    torchvision_crop = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])
    for index in range(len(source)):
        image, flip, target = images[index]
        pil = Image.open(source.name(index)).convert("RGB")
        assert torch.equal(image, torchvision_crop(pil_to_tensor(pil)))
        # Pillow's resize, with which most models were trained, rounds differently.
        assert (image.float() - pil_to_tensor(torchvision_crop(pil)).float()).abs().mean() < 1
        assert (flip, target) == (False, source.target(index))


@pytest.mark.parametrize("size", [(300, 100), (100, 300), (64, 64), (30, 41), (1, 1)])
def test_center_crop_of_any_shape_equals_torchvision(size):
    file = encode(gradient(*size), "PNG")
    image, _ = data.CenterCrop(56, resize=64)(file, decoding.find("auto"))
    torchvision_crop = v2.Compose([v2.Resize(64, antialias=True), v2.CenterCrop(56)])
    assert torch.equal(image, torchvision_crop(pil_to_tensor(gradient(*size))))


@pytest.mark.slow
def test_random_resized_crop_is_close_to_torchvision(photographs):
    source = data.image_source(photographs, "train")
    crop, decoder = data.RandomResizedCrop(224), decoding.find("auto")
    for index in range(len(source)):
        torch.manual_seed(index)
        image, _ = crop(source.read(index), decoder)
        torch.manual_seed(index)
        drawn = torch.rand(23, dtype=torch.float64).tolist()
        pil = Image.open(source.name(index)).convert("RGB")
        part = crop.part(pil.height, pil.width, drawn)
        expected = pil_to_tensor(v2.functional.resized_crop(pil, *part, [224, 224]))
        difference = (image.float() - expected.float()).abs().mean()
        # A crop shifted by one pixel differs by more than this on these photographs.
        assert difference < 4, f"image {index}: {difference}"


def test_random_resized_crop_covers_its_ranges():
    crop = data.RandomResizedCrop(224)
    generator = torch.Generator().manual_seed(0)
    areas, shapes, tops = [], [], []
    for _ in range(2000):
        drawn = torch.rand(23, dtype=torch.float64, generator=generator).tolist()
        top, left, height, width = crop.part(375, 500, drawn)
        assert 0 <= top <= top + height <= 375
        assert 0 <= left <= left + width <= 500
        areas.append(height * width / (375 * 500))
        shapes.append(width / height)
        tops.append(top / max(375 - height, 1))
    assert 0.078 < min(areas) < 0.1
    assert max(areas) > 0.9
    assert 0.74 < min(shapes) < 0.76
    assert 1.3 < max(shapes) < 1.35
    assert abs(sum(tops) / len(tops) - 0.5) < 0.03


@pytest.mark.parametrize(
    ("size", "expected"),
    [((10, 1000), (0, 493, 10, 13)), ((1000, 10), (493, 0, 13, 10)), ((1, 1), (0, 0, 1, 1))],
)
def test_random_resized_crop_of_extreme_shape_takes_the_middle(size, expected):
    # The first random number selects the whole area of the image, so no attempt fits.
    drawn = [1.0, 0.5] * 10 + [0.3, 0.3, 0.3]
    assert data.RandomResizedCrop(224).part(*size, drawn) == expected


def test_large_images_are_decoded_at_reduced_size():
    shapes = []

    class RecordingPillow(decoding.Pillow):
        def decode(self, file, least=None):
            shapes.append(super().decode(file, least).shape[1:])
            return super().decode(file, least)

    large = encode(gradient(640, 480))
    data.RandomResizedCrop(64, scale=(1, 1), ratio=(4 / 3, 4 / 3))(large, RecordingPillow())
    data.RandomResizedCrop(200, scale=(0.1, 0.1))(large, RecordingPillow())
    assert shapes == [(120, 160), (480, 640)]


def test_random_resized_crop_with_augment():
    crop = data.RandomResizedCrop(32, augment=v2.TrivialAugmentWide())
    image, _ = crop(GOOD, decoding.find("auto"))
    assert (image.dtype, image.shape) == (torch.uint8, (3, 32, 32))
    black, _ = data.RandomResizedCrop(32, augment=torch.zeros_like)(GOOD, decoding.find("auto"))
    assert not black.any()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: data.RandomResizedCrop(0),
        lambda: data.RandomResizedCrop(8, scale=(0.5, 0.1)),
        lambda: data.RandomResizedCrop(8, ratio=(0, 1)),
        lambda: data.CenterCrop(256, resize=224),
        lambda: data.Normalize((0.5,), (0.5, 0.5)),
        lambda: data.Normalize((0.5,), (0.0,)),
    ],
)
def test_image_transforms_refuse_invalid_arguments(wrong):
    with pytest.raises(UsageError) as caught:
        wrong()
    assert caught.value.code == "HT516"


def test_normalize_flips_and_equals_torchvision():
    images = torch.stack([pil_to_tensor(gradient())] * 3)
    flips, targets = torch.tensor([False, True, False]), torch.arange(3)
    reference = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])
    normal, same_targets = data.Normalize(MEAN, STD)((images, flips, targets))
    expected = reference(images)
    expected[1] = expected[1].flip(2)
    torch.testing.assert_close(normal, expected)
    assert torch.equal(same_targets, targets)
    unflipped, _ = data.Normalize(MEAN, STD)((images, targets))
    torch.testing.assert_close(unflipped, reference(images))


def test_normalize_keeps_channels_last_and_dtype():
    images = torch.stack([pil_to_tensor(gradient())] * 2)
    images = images.contiguous(memory_format=torch.channels_last)
    normalize = data.Normalize(MEAN, STD, dtype=torch.bfloat16)
    normal, _ = normalize((images, torch.tensor([True, False]), torch.arange(2)))
    assert normal.dtype == torch.bfloat16
    assert normal.is_contiguous(memory_format=torch.channels_last)
    assert images.dtype == torch.uint8


TRUNCATED = GOOD[: len(GOOD) // 2]


@pytest.mark.parametrize("corrupt", [TRUNCATED, b"", b"no image", GOOD[:30]])
@pytest.mark.parametrize("decoder", DECODERS)
def test_corrupt_image_is_an_error_with_its_name(corrupt, decoder):
    images = data.ImageSet(Files(GOOD, corrupt), data.CenterCrop(32, 32), decoder=decoder)
    images[0]
    with pytest.raises(DataError, match=r"memory/1\.jpg is no image") as caught:
        images[1]
    assert "--max-corrupt 10" in caught.value.fixes[1]
    assert caught.value.code == "HT517"


def test_max_corrupt_images_are_ignored_by_the_loss(caplog):
    files = [GOOD, TRUNCATED, b"", b"no image"]
    images = data.ImageSet(Files(*files), data.RandomResizedCrop(32), max_corrupt=2)
    for _ in range(2):
        samples = [images[0], images[1], images[2]]
    assert [target for _, _, target in samples] == [0, data.IGNORED, data.IGNORED]
    assert (samples[1][0] == 128).all()
    messages = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in messages] == ["memory/1.jpg", "memory/2.jpg"]
    with pytest.raises(DataError, match=r"memory/3\.jpg .*2 other images before it") as caught:
        images[3]
    assert caught.value.expected == "at most 2 such files in the whole data set"
    assert "--max-corrupt 10" in caught.value.fixes[1]
    outputs, targets = torch.randn(3, 3), torch.tensor([target for _, _, target in samples])
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    assert loss == torch.nn.functional.cross_entropy(outputs[:1], targets[:1])


def test_image_set_index_out_of_range(tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    (tmp_path / "train" / "a" / "x.jpg").write_bytes(GOOD)
    images = data.ImageSet(data.image_source(tmp_path, "train"), data.CenterCrop(8, 8))
    assert images[0][2] == 0
    for index in (-1, 1):
        with pytest.raises(IndexError):
            images[index]
        with pytest.raises(IndexError):
            images.source.target(index)


def test_max_corrupt_is_counted_once_over_epochs():
    files = Files(*(b"" if number % 4 == 0 else GOOD for number in range(24)))
    images = data.ImageSet(files, data.RandomResizedCrop(8), max_corrupt=6)
    sampler = data.TrainingSampler(24, Batches(4, 4, 1), World(0, 1, 0, 1, 0, 1), seed=1)
    loader = data.Loader(images, sampler, Placement(CPU), workers=2, seed=1, rank=0)
    for epoch in range(4):
        sampler.epoch = epoch
        ignored = sum(int((targets == data.IGNORED).sum()) for _, _, targets in loader)
        assert ignored == 6


def test_max_corrupt_needs_a_transform_with_a_size():
    def crop(file, decoder):
        return decoder.decode(file)[:, :8, :8], False

    assert data.ImageSet(FILES, crop)[0][0].shape == (3, 8, 8)
    with pytest.raises(UsageError, match="without a size") as caught:
        data.ImageSet(FILES, crop, max_corrupt=1)
    assert caught.value.code == "HT516"
    crop.size = 8
    assert data.ImageSet(Files(b""), crop, max_corrupt=1)[0][2] == data.IGNORED


def with_size_in_header(height, width):
    """Return a JPEG with another size in its header."""
    start = GOOD.index(b"\xff\xc0") + 5
    return GOOD[:start] + struct.pack(">HH", height, width) + GOOD[start + 4 :]


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("least", [None, (8, 8)])
def test_decompression_bomb_is_a_corrupt_image(name, least, monkeypatch):
    decoder = decoding.find(name)
    if name == "simplejpeg":
        module = sys.modules["simplejpeg"]
        monkeypatch.setattr(module, "decode_jpeg", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(decoding.CorruptError, match="decompression bomb"):
        decoder.decode(with_size_in_header(60000, 60000), least)
    with pytest.raises(decoding.CorruptError, match="decompression bomb"):
        decoder.size(with_size_in_header(60000, 60000))


GREYS = numpy.array([[0x1234, 0xFFFF, 0, 128, 129, 0x8000]], dtype=numpy.uint16)
DEEP = {
    "PNG": encode(Image.fromarray(GREYS), "PNG"),
    "TIFF": encode(Image.fromarray(GREYS), "TIFF"),
    "TIFF, the high byte first": encode(Image.fromarray(GREYS.astype(">u2")), "TIFF"),
    "PGM": encode(Image.fromarray(GREYS), "PPM"),
}


@pytest.mark.parametrize("kind", DEEP)
def test_16_bit_grey_keeps_its_brightness(kind):
    pixels = decoding.find("auto").decode(DEEP[kind])
    assert pixels.shape == (3, 1, 6)
    assert (pixels.numpy() == (GREYS / 257).round()).all()


def test_decoding_prints_no_warning(monkeypatch):
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 64 * 48 - 1
    )  # Pillow warns of its size when it opens the file
    decoder = decoding.find("pillow")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decoder.size(GOOD) == (48, 64)
        assert decoder.decode(GOOD).shape == (3, 48, 64)


@pytest.mark.parametrize("workers", [0, 2])
def test_data_error_from_a_loader_worker_keeps_its_message(workers):
    images = data.ImageSet(Files(GOOD, TRUNCATED), data.CenterCrop(32, 32))
    try:
        list(DataLoader(images, batch_size=1, num_workers=workers))
    except DataError as raised:
        error = raised.with_traceback(None)  # the traceback keeps the loader's processes alive
    assert error.code == "HT517"
    assert error.found.startswith("memory/1.jpg is no image that can be decoded: ")
    assert error.expected == "an image"
    assert error.fixes[0] == "fetch it again"
    assert error.fixes[1].startswith("--max-corrupt 10 to continue without such files, if ")
    assert len(error.fixes) == 2
    assert "Traceback" not in str(error)


def test_image_batches_have_the_layout_for_normalize(photographs):
    images = data.ImageSet(data.image_source(photographs, "train"), data.RandomResizedCrop(32))
    pixels, flips, targets = next(iter(DataLoader(images, batch_size=9)))
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (9, 3, 32, 32))
    assert (flips.dtype, targets.dtype) == (torch.bool, torch.int64)
    assert targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_image_samples_do_not_depend_on_batch_size_workers_or_shards(photographs, tmp_path):
    make(photographs, tmp_path / "tar", ["train"], 10**5)

    def epoch(folder, batch_size, workers):
        source = data.image_source(folder, "train")
        images = data.ImageSet(source, data.RandomResizedCrop(32))
        batches = Batches(batch_size, batch_size, 1)
        sampler = data.TrainingSampler(len(images), batches, World(0, 1, 0, 1, 0, 1), seed=1)
        loader = data.Loader(images, sampler, Placement(CPU), workers=workers, seed=1, rank=0)
        return [torch.cat(parts) for parts in zip(*loader, strict=True)]

    from_folder, from_shards = epoch(photographs, 9, 0), epoch(tmp_path / "tar", 3, 2)
    for one, other in zip(from_folder, from_shards, strict=True):
        assert torch.equal(one, other)


def test_synthetic_images():
    images = data.SyntheticImages(20, size=16, classes=5)
    batches = list(DataLoader(images, batch_size=8))
    assert [len(targets) for _, _, targets in batches] == [8, 8, 4]
    pixels, flips, targets = batches[0]
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (8, 3, 16, 16))
    assert (flips.dtype, targets.dtype) == (torch.bool, torch.int64)
    assert targets.max() < 5
    assert len({pixels.data_ptr() for pixels, _, _ in batches}) == 1
    assert images[0][0].shape == (3, 16, 16)
    in_processes = next(iter(DataLoader(images, batch_size=8, num_workers=2)))
    assert torch.equal(in_processes[0], pixels)
