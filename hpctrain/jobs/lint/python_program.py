"""What a Python script shows of its GPUs and its launcher. It is read, and not executed."""

import ast
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PythonProgram"]

_MOST_BYTES, _MOST_FILES = 2**18, 20
# Modules that use one GPU, if their caller names no other.
_PLAIN = """
PIL cv2 einops h5py hpctrain matplotlib numpy pandas scipy skimage sklearn tensorboard timm torch
torchaudio torchmetrics torchvision tqdm wandb yaml
"""
_STARTS_PROCESSES = "asyncio concurrent importlib multiprocessing subprocess"
# Names of what starts processes or uses several GPUs.
_SEVERAL = """
DataParallel DistributedDataParallel data_parallel device_count device_map distributed popen
set_device system
"""
_KNOWN = {*_PLAIN.split(), *sys.stdlib_module_names} - {*_STARTS_PROCESSES.split()}


class PythonProgram:
    """The text of a Python script and of the modules beside it.

    Attributes:
        modules: names of imported modules, up to the first dot, without the modules that were read.
        whole: whether all files could be read.
    """

    def __init__(self, path: Path) -> None:
        self.modules: set[str] = set()
        self.whole = True
        self._names: set[str] = set()
        self._texts: set[str] = set()
        self._chooses_gpu = False
        files, seen = deque([path]), {path}
        while files:
            tree = _parsed(files.popleft())
            if not tree or len(seen) > _MOST_FILES:
                self.whole = False
                return
            for module in self._take(tree):
                beside = path.parent / f"{module}.py"
                if not beside.is_file():
                    self.modules.add(module)
                elif beside not in seen:
                    seen.add(beside)
                    files.append(beside)

    @property
    def one_gpu(self) -> bool:
        """Whether it uses a GPU, without signs of others, of processes, or of unknown modules."""
        starts = any(name.startswith(("exec", "fork", "spawn")) for name in self._names)
        several = starts or self._chooses_gpu or not self._names.isdisjoint(_SEVERAL.split())
        devices = {text for text in self._texts if text.startswith("cuda")}
        uses = devices or {"accelerator", "cuda"} & self._names or "hpctrain" in self.modules
        one = not several and devices <= {"cuda", "cuda:0"} and self.modules <= _KNOWN
        return self.whole and bool(uses) and one

    def _take(self, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    self._names.update(part for one in names for part in one.name.split("."))
                    yield from (one.name.partition(".")[0] for one in names)
                case ast.ImportFrom(module=module, names=names, level=level):
                    self._names.update((module or "").split("."), (one.name for one in names))
                    yield (module or "").partition(".")[0] if not level else "."
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    self._names.add(name)
                case ast.keyword(arg=str(name)):
                    self._names.add(name)
                case ast.Constant(value=str(text)):
                    self._texts.add(text)
                case ast.Call(func=ast.Attribute(attr="cuda"), args=[_, *_]):
                    self._chooses_gpu = True
                case ast.Call(func=ast.Attribute(attr="device"), args=[_, _, *_]):
                    self._chooses_gpu = True
                case ast.Call(func=ast.Attribute(attr="to"), args=[ast.Constant(value=int())]):
                    self._chooses_gpu = True


def _parsed(path: Path) -> ast.Module | None:
    """Return the parsed file; None if it is not there, too large, or not Python."""
    try:
        if path.is_file() and path.stat().st_size <= _MOST_BYTES:
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return None
