"""Folders and tar files give the same samples; missing or damaged files are clear errors."""

import errno
import io
import os
import pickle
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpctrain.cli import main
from hpctrain.data.shards.folders import FolderSource
from hpctrain.data.shards.index import build_index
from hpctrain.data.shards.layouts import image_source, same_classes
from hpctrain.data.shards.shard_reader import ShardSource
from hpctrain.data.shards.writing import make
from hpctrain.errors import DataError, HpctrainError, UsageError


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.fixture
def folders(tmp_path):
    """Return a folder with two splits of files that are not images; no test decodes them."""
    files = {
        f"{split}/{name}/{number}.JPEG": f"{split} {name} {number}".encode() * 40
        for split, count in (("train", 7), ("val", 2))
        for name in ("n01", "002.Laysan_Albatross", "cat")
        for number in range(count)
    }
    odd = {"train/cat/a.jpg": b"one", "train/cat/a.png": b"two", "train/cat/b.c.jpg": b"three"}
    write(tmp_path / "images", files | odd)
    return tmp_path / "images"


@pytest.fixture
def shards_folder(folders):
    target = folders.parent / "shards"
    make(folders, target, ["train", "val"], shard_size=5000)
    return target


def pack(path, *files, **options):
    """Write a tar file as other programs do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as tar:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def samples_of(source):
    return [(source.read(i), source.target(i)) for i in range(len(source))]


def test_image_folder_sorts_classes_and_skips_other_files(tmp_path):
    write(
        tmp_path / "train",
        {
            "b/2.jpg": b"b2",
            "b/10.JPG": b"b10",
            "a/x.png": b"ax",
            "a/images/deep.webp": b"deep",
            "a/._x.png": b"of macOS",
            "a/notes.txt": b"",
            ".hidden/x.jpg": b"",
            "README.jpg": b"",
        },
    )
    (tmp_path / "train" / "c").symlink_to(tmp_path / "train" / "b")
    source = image_source(tmp_path, "train")
    assert source.classes == ["a", "b", "c"]
    content = [(b"ax", 0), (b"deep", 0), (b"b10", 1), (b"b2", 1), (b"b10", 2), (b"b2", 2)]
    assert samples_of(source) == content
    assert source.name(2) == str(tmp_path / "train" / "b" / "10.JPG")


def test_shards_hold_the_samples_of_the_folder_in_order(folders, shards_folder):
    for split in ("train", "val"):
        folder, tar = image_source(folders, split), image_source(shards_folder, split)
        assert isinstance(folder, FolderSource)
        assert isinstance(tar, ShardSource)
        assert folder.classes == tar.classes
        assert samples_of(folder) == samples_of(tar)
    assert len(list(shards_folder.glob("train-*.tar"))) > 3
    assert tar.name(0) == f"{shards_folder}/val-000000.tar: 002.Laysan_Albatross/0.JPEG"


def test_shards_follow_the_webdataset_convention(shards_folder, folders):
    """Pair files as webdataset does: a key ends at the first dot after the last slash."""
    samples = {}
    for path in sorted(shards_folder.glob("train-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                key, _, suffix = name.partition(".")
                sample = samples.setdefault(f"{folder}/{key}", {})
                assert suffix not in sample
                sample[suffix.lower()] = tar.extractfile(member).read()
    expected = [
        (data, str(target).encode()) for data, target in samples_of(image_source(folders, "train"))
    ]
    assert [
        (next(v for k, v in s.items() if k != "cls"), s["cls"]) for s in samples.values()
    ] == expected


def test_shard_index_is_rebuilt_from_the_tar_files(shards_folder, caplog):
    caplog.set_level("INFO", "hpctrain")
    written = (shards_folder / "train.index").read_bytes()
    before = samples_of(image_source(shards_folder, "train"))
    (shards_folder / "train.index").unlink()
    source = image_source(shards_folder, "train")
    assert samples_of(source) == before
    assert f"hpctrain shards index {shards_folder}" in caplog.text
    assert main(["shards", "index", str(shards_folder)]) == 0
    assert (shards_folder / "train.index").read_bytes() == written


def test_shards_of_other_programs_are_read(tmp_path, capsys):
    zero = [("0.cls", b"4\n"), ("0.json", b"{}"), ("0.jpg", b"zero")]
    pack(tmp_path / "train-0000.tar", *zero, ("1.PNG", b"one"), ("1.json", b"{}"), ("1.cls", b"0"))
    assert main(["shards", "index", str(tmp_path)]) == 0
    assert "2 images of 5 classes in 1 tar files" in capsys.readouterr().out
    source = image_source(tmp_path, "train")
    assert samples_of(source) == [(b"zero", 4), (b"one", 0)]
    assert source.classes == ["0", "1", "2", "3", "4"]


def test_shard_source_after_fork_and_pickle(shards_folder):
    source = image_source(shards_folder, "train")
    expected = samples_of(source)
    assert samples_of(pickle.loads(pickle.dumps(source))) == expected
    read, write_end = os.pipe()
    child = os.fork()
    if not child:
        equal = samples_of(source) == expected
        os.write(write_end, b"y" if equal else b"n")
        os._exit(0)
    assert samples_of(source) == expected
    os.waitpid(child, 0)
    assert os.read(read, 1) == b"y"
    os.close(read)
    os.close(write_end)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10240])


def change_content(path):
    """Change the content of the file but not its size."""
    path.write_bytes(path.read_bytes().replace(b"0000644", b"0000600"))


def rewrite(path, change):
    """Write the tar file again, with names and data that `change` returns, of the same size."""
    with tarfile.open(path) as tar:
        files = [(one.name, tar.extractfile(one).read()) for one in tar]
    pack(path, *(change(number, *file) for number, file in enumerate(files)))


def change_class(path):
    rewrite(path, lambda n, name, data: (name, b"7" if n == 3 else data))


def change_name(path):
    rewrite(path, lambda n, name, data: (name.replace("/", "_") if n == 2 else name, data))


def remove(path):
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "bytes in the index: .*, in the folder: "),
        (remove, "in the folder: no file"),
        (change_content, "a different tar"),
        (change_class, "sample 1 .* has a different class"),
        (change_name, "sample 1 differs"),
    ],
)
def test_shard_index_that_does_not_match_the_tar_files_is_refused(shards_folder, damage, message):
    damage(shards_folder / "train-000001.tar")
    with pytest.raises(UsageError, match=message) as caught:
        samples_of(image_source(shards_folder, "train"))
    assert "train-000001.tar" in caught.value.found
    renewal = f"rm {shards_folder}/train.index && hpctrain shards index {shards_folder}"
    assert caught.value.fixes == ("copy the tar files again", renewal)
    assert caught.value.code == "HT521"


def test_shard_index_without_one_of_the_tar_files_is_refused(shards_folder):
    (shards_folder / "train-000099.tar").write_bytes(b"")
    with pytest.raises(
        UsageError, match=r"train-000099\.tar: bytes in the index: no file"
    ) as caught:
        image_source(shards_folder, "train")
    assert caught.value.code == "HT521"


def flip(content, before):
    """Return a file with another letter or digit a little after `before`."""
    at = content.index(before) + len(before) + 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_damaged_shard_index_is_refused(shards_folder):
    path = shards_folder / "val.index"
    written = path.read_bytes()
    for content in (
        written[:-1],
        written[:100],
        b"[]",
        written.replace(b"shards 2", b"shards 1"),
        written.replace(b'"samples": ', b'"samples": 1'),
        flip(written, b'"rows": "'),
        flip(written, b'"classes": ["'),
    ):
        assert content != written
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"val\.index is damaged: ") as caught:
            image_source(shards_folder, "val")
        assert caught.value.code == "HT521"


@pytest.mark.parametrize("size", [0.4, 0.7, 0.99])
def test_truncated_shard_without_an_index_is_refused(shards_folder, size):
    (shards_folder / "train.index").unlink()
    path = sorted(shards_folder.glob("train-*.tar"))[-1]
    content = path.read_bytes().rstrip(b"\0")
    path.write_bytes(content[: int(size * len(content))])
    with pytest.raises(UsageError, match=r"is damaged|has no") as caught:
        image_source(shards_folder, "train")
    assert path.name in caught.value.found


def raise_no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_shards_make_on_a_full_disk_leaves_no_files(folders, monkeypatch):
    target = folders.parent / "shards"
    monkeypatch.setattr(os, "fsync", raise_no_space)
    with pytest.raises(HpctrainError) as caught:
        make(folders, target, ["train"], 10**6)
    assert caught.value.found == f"{target} cannot be written: No space left on device"
    assert caught.value.code == "HT522"
    assert [path.name for path in folders.parent.iterdir()] == ["images"]


def test_shards_make_names_an_unreadable_image(folders):
    (folders / "train" / "cat" / "broken.jpg").symlink_to("nowhere")
    with pytest.raises(DataError, match="No such file") as caught:
        make(folders, folders.parent / "shards", ["train"], 10**6)
    assert "broken.jpg" in caught.value.found
    assert caught.value.code == "HT511"
    assert [path.name for path in folders.parent.iterdir()] == ["images"]


def test_shards_make_refuses_an_existing_target(folders, shards_folder):
    with pytest.raises(UsageError, match="shards exists"):
        make(folders, shards_folder, ["train"], 10**6)
    (folders.parent / ".new.part").mkdir()
    with pytest.raises(UsageError, match="another process is writing") as caught:
        make(folders, folders.parent / "new", ["train"], 10**6)
    fix = f"rm -r {folders.parent}/.new.part (if no other process is writing)"
    assert caught.value.fixes == (fix,)
    assert caught.value.code == "HT522"
    assert (folders.parent / ".new.part").exists()


def test_shards_make_command_with_size_and_splits(folders, capsys):
    target = folders.parent / "by-command"
    command = ["shards", "make", str(folders), str(target), "--splits", "val"]
    assert main([*command, "--shard-size", "1M"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{target}: val\n"
    assert "val: 6 of 6 images" in err
    assert sorted(path.name for path in target.iterdir()) == ["val-000000.tar", "val.index"]
    with pytest.raises(SystemExit):
        main([*command, "--shard-size", "big"])
    assert "no size such as 500M" in capsys.readouterr().err


def refusal(code, path, split="train", env=None):
    with pytest.raises(UsageError) as caught:
        image_source(path, split, env or {})
    assert caught.value.code == code
    return caught.value


def test_data_folder_missing_or_a_file_is_refused(tmp_path):
    assert refusal("HT510", tmp_path / "none").found.endswith(f"no folder {tmp_path}/none")
    write(tmp_path, {"file": b""})
    assert "no folder" in refusal("HT510", tmp_path / "file").found


def test_data_folder_without_the_split_is_refused(tmp_path):
    write(tmp_path, {f"{name}/x.jpg": b"" for name in "abcdefg"})
    error = refusal("HT510", tmp_path)
    assert error.found == f"{tmp_path} has no train: there is a, b, c, d, e and 2 more"
    assert f"{tmp_path}/train/CLASS/*.jpg" in error.expected
    assert f"{tmp_path}/train-*.tar" in error.expected


def test_data_folder_one_level_too_high_suggests_the_right_one(folders):
    assert refusal("HT510", folders.parent).fixes == (f"--data {folders}",)


def test_flat_validation_set_and_empty_class_are_refused(tmp_path):
    write(tmp_path, {"val/ILSVRC2012_val_1.JPEG": b"", "val/ILSVRC2012_val_2.JPEG": b""})
    error = refusal("HT518", tmp_path, "val")
    assert error.found == f"{tmp_path}/val has 2 images and no folders"
    assert error.fixes == ("move each image into the folder of its class",)
    write(tmp_path, {"train/a/x.jpg": b"", "train/b/notes.txt": b""})
    error = refusal("HT518", tmp_path)
    assert error.found == f"{tmp_path}/train/b has no images"
    assert error.fixes == (f"rmdir {tmp_path}/train/b", "fetch its images again")


def test_data_set_name_prefers_the_copy_of_the_job(folders, monkeypatch):
    monkeypatch.chdir(folders.parent)
    assert image_source("images", "val", {}).place == "images/val"
    source = image_source("images", "val", {"HPCTRAIN_DATA": str(folders.parent)})
    assert source.place == str(folders / "val")


LONG = "n" * 300  # longer than file systems allow


def test_data_folder_that_cannot_be_read_is_refused_with_the_reason(folders, monkeypatch, capsys):
    assert "File name too long" in refusal("HT511", LONG).found
    assert "File name too long" in refusal("HT511", f"/{LONG}").found
    assert "File name too long" in refusal("HT511", folders, LONG).found
    new = folders.parent / "new"
    for source, target, splits in (
        (folders / LONG, new, ["train"]),
        (folders, folders / LONG, ["train"]),
    ):
        with pytest.raises(UsageError, match="File name too long") as caught:
            make(source, target, splits, 10**6)
        assert caught.value.code == "HT511"
    assert "File name too long" in error_of(capsys, "index", folders / LONG)
    assert not new.exists()

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "iterdir", refuse)
        assert f"{folders}: Permission denied" in refusal("HT511", folders, "test").found
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        train = folders / "train"
        assert refusal("HT511", folders).found == f"--data {folders}: {train}: Permission denied"
        with pytest.raises(UsageError, match=f"{train}: Permission denied"):
            make(folders, new, ["train"], 10**6)
    assert not new.exists()


def test_splits_with_different_classes_are_refused(folders):
    train, val = image_source(folders, "train"), image_source(folders, "val")
    assert same_classes(train, val) == ["002.Laysan_Albatross", "cat", "n01"]
    (folders / "val" / "cat").rename(folders / "val" / "dog")
    with pytest.raises(UsageError) as caught:
        same_classes(train, image_source(folders, "val"))
    assert caught.value.code == "HT519"
    assert f"1 only in {folders}/train, such as cat" in caught.value.found
    assert f"1 only in {folders}/val, such as dog" in caught.value.found


# --- shards of other programs, and damaged ones


ONE = (("0.jpg", b"photo"), ("0.cls", b"0"))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ((*ONE, ("0.seg.png", b"mask")), "0 has 2 images, and 1 .cls with the number of a class"),
        ((*ONE, ("0.cls", b"1")), "0 has 1 images, and 2 .cls"),
        ((ONE[0], ("0.cls", b"4294967296")), "0 has 1 images, and 0 .cls"),
        ((ONE[0], ("0.cls", b"7" * 5000)), "0 has 1 images, and 0 .cls"),
        ((ONE[0], ("0.cls", b"900000000")), "0 has 1 images, and 0 .cls"),
    ],
)
def test_shard_sample_with_two_images_or_no_class_is_refused(tmp_path, files, message):
    pack(tmp_path / "train-000000.tar", *files)
    with pytest.raises(UsageError, match=message) as caught:
        image_source(tmp_path, "train")
    assert caught.value.code == "HT520"


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_shard_with_links_or_pipes_is_refused(tmp_path, kind):
    """Include hard links: Python's and GNU's tar store the second name of a file as a link."""
    path = tmp_path / "train-000000.tar"
    pack(path, *ONE)
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("1.jpg")
        member.type, member.linkname = kind, "0.jpg"
        tar.addfile(member)
    with pytest.raises(UsageError, match=r"train-000000\.tar: 1\.jpg is a ") as caught:
        image_source(tmp_path, "train")
    assert caught.value.fixes[0].startswith("tar --dereference --hard-dereference -cf …")
    assert caught.value.code == "HT520"


HEADERS = {
    "a size that is no number": ("1.jpg", b"zzzzzzzzzzz\0"),
    "a size below 0": ("1.jpg", b"\xff" * 11 + b"\x80"),
    "a size that ends in the middle": ("0.cls", b"77777777777\0"),
    "a size that no file can have": ("1.jpg", b"\x80" + b"\xff" * 11),
    "a size that no name can have": ("é.jpg", b"\x80" + b"\xff" * 11),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_damaged_tar_header_is_refused(tmp_path, damage):
    path = tmp_path / "train-000000.tar"
    odd = (("é.jpg", b"one"), ("é.cls", b"1"))
    pack(path, *ONE, *odd, ("1.jpg", b"one"), ("1.cls", b"1"))
    name, size = HEADERS[damage]
    with tarfile.open(path) as tar:
        start = tar.getmember(name).offset
    header = bytearray(path.read_bytes()[start : start + 512])
    header[124:136], header[148:156] = size, b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path.write_bytes(path.read_bytes()[:start] + header + path.read_bytes()[start + 512 :])
    assert str(path) in refusal("HT513", tmp_path).found


def test_old_tar_format_is_read_and_sparse_files_are_refused(tmp_path):
    write(tmp_path / "a", {"0.jpg": b"photo", "0.cls": b"0"})
    path = tmp_path / "train-000000.tar"
    create = ["tar", "-C", tmp_path, "--sort=name", "-cf", path]
    subprocess.run([*create, "--format=v7", "a"], check=True)
    assert samples_of(image_source(tmp_path, "train")) == [(b"photo", 0)]
    with open(tmp_path / "a" / "0.jpg", "wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 20)
        file.write(b"photo")
    subprocess.run([*create, "-S", "a"], check=True)
    with pytest.raises(UsageError, match=r"a/0\.jpg is a link or a device, or has holes"):
        image_source(tmp_path, "train")


@pytest.mark.parametrize("number", ["first", "middle"])
def test_missing_shard_is_refused_without_an_index(shards_folder, number):
    (shards_folder / "train.index").unlink()
    number = 0 if number == "first" else 1
    (shards_folder / f"train-{number:06d}.tar").unlink()
    with pytest.raises(UsageError, match=f"number {number} is missing") as caught:
        image_source(shards_folder, "train")
    assert caught.value.code == "HT513"


def test_bytes_after_the_end_of_a_shard_are_refused(shards_folder):
    first, second = shards_folder / "val-000000.tar", shards_folder / "val-000001.tar"
    (shards_folder / "val.index").unlink()
    content = first.read_bytes()
    first.write_bytes(content + second.read_bytes())
    with pytest.raises(
        UsageError, match=r"val-000000\.tar is damaged: its files end at byte"
    ) as caught:
        image_source(shards_folder, "val")
    assert caught.value.fixes == ("copy it again", "make it again with hpctrain shards make")
    assert caught.value.code == "HT513"
    # A copy that was not finished: the right size, without the content.
    first.write_bytes(content[:3072] + bytes(len(content) + 10240 - 3072))
    with pytest.raises(UsageError, match=r"val-000000\.tar is damaged"):
        image_source(shards_folder, "val")


@pytest.mark.parametrize("below", ["", "images/"])
def test_rebuilt_shard_index_keeps_class_names(tmp_path, below):
    """Include images one folder deeper, as in Tiny ImageNet."""
    names = ("n01", "n02", "n03")
    write(tmp_path / "images", {f"train/{name}/{below}x.JPEG": b"x" for name in names})
    make(tmp_path / "images", tmp_path / "shards", ["train"], 10**6)
    (tmp_path / "shards" / "train.index").unlink()
    assert image_source(tmp_path / "shards", "train").classes == list(names)


def test_class_names_below_a_common_folder_in_a_shard(tmp_path):
    files = [
        (f"train/{name}/x.{suffix}", data)
        for name, number in (("cat", b"0"), ("dog", b"1"))
        for suffix, data in (("jpg", b"photo"), ("cls", number))
    ]
    pack(tmp_path / "train-000000.tar", *files)
    assert image_source(tmp_path, "train").classes == ["cat", "dog"]


def test_names_in_a_shard_are_unique(tmp_path):
    """Extracting a tar file keeps only one of two files with the same name."""
    names = ("a.b.jpg", "a.jpg", "a.k.jpg", "a.png", "a_b-0.jpg", "a_k-2.jpg", "a_k-2-5.jpg")
    write(tmp_path / "images" / "train" / "c", {name: name.encode() for name in names})
    make(tmp_path / "images", tmp_path / "shards", ["train"], 10**6)
    with tarfile.open(tmp_path / "shards" / "train-000000.tar") as tar:
        found = tar.getnames()
    assert len(set(found)) == len(found) == 2 * len(names)
    (tmp_path / "shards" / "train.index").unlink()
    again = samples_of(image_source(tmp_path / "shards", "train"))
    assert [data.decode() for data, _ in again] == sorted(names)


def test_shard_keeps_long_and_non_utf8_names(tmp_path):
    long, odd = f"{'c' * 120}/{'n' * 150}.jpg", "d/\udce9 \N{LATIN SMALL LETTER E WITH ACUTE}.jpg"
    write(tmp_path / "images" / "train", {long: b"1", odd: b"2"})
    make(tmp_path / "images", tmp_path / "shards", ["train"], 10**6)
    source = image_source(tmp_path / "shards", "train")
    assert [source.name(i).partition(": ")[2] for i in range(2)] == [long, odd]


MANY = """
import resource, sys
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from hpctrain.data.shards.shard_reader import ShardSource
source = ShardSource(sys.argv[1], "train")
print(len({source.read(i) for _ in range(2) for i in range(len(source))}))
"""


def pack_many(tmp_path, count):
    for number in range(count):
        pack(tmp_path / f"train-{number:04d}.tar", ("0.jpg", str(number).encode()), ("0.cls", b"0"))


def read_with_few_files(tmp_path, limit):
    """Read many tar files in a process with a low limit of open files."""
    pack_many(tmp_path, 300)
    return subprocess.run(
        [sys.executable, "-c", MANY, tmp_path, str(limit)],
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.e2e
def test_more_shards_than_open_files_allowed(tmp_path):
    done = read_with_few_files(tmp_path, 200)
    assert done.stdout == "300\n", done.stderr


@pytest.mark.slow
@pytest.mark.e2e
def test_shards_without_free_descriptors_name_the_limit(tmp_path):
    done = read_with_few_files(tmp_path, 64)
    assert "cannot be read: Too many open files" in done.stderr
    assert "ulimit -n" in done.stderr


def open_files_below(folder):
    """Count the files of a folder that this process has open."""
    links = Path("/proc/self/fd").iterdir()
    return sum(os.path.realpath(link).startswith(f"{folder}/") for link in links)


def test_threads_read_shards_while_files_are_closed(tmp_path):
    pack_many(tmp_path, 200)
    source = image_source(tmp_path, "train")
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(source.read, list(range(200)) * 5))
    assert found == [str(number).encode() for number in range(200)] * 5
    assert 0 < open_files_below(tmp_path) <= 128


# --- mistakes on the command line


def error_of(capsys, *words):
    """Return the error of a `shards` command that fails."""
    assert main(["shards", *map(str, words)]) != 0
    return capsys.readouterr().err


def test_shards_make_refuses_no_split_or_a_missing_one(folders, capsys):
    target = folders.parent / "new"
    error = error_of(capsys, "make", folders, target, "--splits", "train,vall")
    assert f"{folders} has no folder vall" in error
    assert "--splits train\n" in error
    assert "hpctrain explain HT510\n" in error
    assert "no folder a/b" in error_of(capsys, "make", folders, target, "--splits", "a/b")
    error = error_of(capsys, "make", folders, target, "--splits", ",")
    assert "no splits" in error
    assert "--splits train,val\n" in error
    assert [path.name for path in folders.parent.iterdir()] == ["images"]


def test_shards_make_into_this_folder_or_a_link(folders, monkeypatch):
    real = folders.parent / "real"
    real.mkdir()
    (folders.parent / "link").symlink_to(real)
    make(folders, folders.parent / "link", ["val"], 10**6)
    assert len(image_source(real, "val")) == 6
    here = folders.parent / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    make(folders, Path(), ["val"], 10**6)
    assert len(image_source(here, "val")) == 6


def test_shards_make_refuses_a_mount_point(folders, monkeypatch):
    target = folders.parent / "scratch"
    target.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == target)
    with pytest.raises(UsageError, match="scratch exists") as caught:
        make(folders, target, ["val"], 10**6)
    assert caught.value.fixes == (f"{target}/shards",)
    assert caught.value.code == "HT522"


def test_shard_index_written_by_two_at_once(shards_folder, monkeypatch):
    """Start the second write before the first has ended; both finish."""
    index, path = build_index(shards_folder, "val"), shards_folder / "val.index"
    fsync = os.fsync

    def write_meanwhile(file):
        monkeypatch.setattr(os, "fsync", fsync)
        index.write(path)
        fsync(file)

    monkeypatch.setattr(os, "fsync", write_meanwhile)
    index.write(path)
    assert len(image_source(shards_folder, "val")) == 6
    assert not list(shards_folder.glob(".*"))


def test_shard_index_not_writable_is_an_error(shards_folder, capsys, monkeypatch):
    (shards_folder / "val.index").unlink()
    monkeypatch.setattr(os, "fsync", raise_no_space)
    assert "val.index: No space left on device" in error_of(capsys, "index", shards_folder)


@pytest.mark.parametrize("name", ["b", "a/deeper"])
def test_broken_link_in_an_image_folder_is_refused(tmp_path, name):
    write(tmp_path, {"train/a/x.jpg": b"x"})
    (tmp_path / "train" / name).symlink_to("/nowhere")
    error = refusal("HT518", tmp_path)
    assert error.found == f"{tmp_path}/train/{name} is a link to /nowhere, which does not exist"
    assert error.fixes == ("fetch the missing files", f"rm {tmp_path}/train/{name}")
