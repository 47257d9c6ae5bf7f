"""Advice after `No module named …`: the package that has the module, or none.

The package with the name of an unknown module may be another one, abandoned, or made for those who
type a wrong name. So only packages that are listed here are named.
"""

import os
import pkgutil
import re
from collections.abc import Iterable, Sequence

__all__ = ["advice"]

_MISSING = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
# Packages with another name than their module.
_PACKAGES = {
    "Bio": "biopython", "Crypto": "pycryptodome", "OpenSSL": "pyOpenSSL", "PIL": "Pillow",
    "attr": "attrs", "bs4": "beautifulsoup4", "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil", "dotenv": "python-dotenv", "faiss": "faiss-cpu",
    "fitz": "PyMuPDF", "git": "GitPython", "hydra": "hydra-core", "jwt": "PyJWT",
    "magic": "python-magic", "open_clip": "open-clip-torch", "pkg_resources": "'setuptools<81'",
    "pl_bolts": "lightning-bolts", "psycopg2": "psycopg2-binary", "pywt": "PyWavelets",
    "serial": "pyserial", "skimage": "scikit-image", "sklearn": "scikit-learn",
    "skopt": "scikit-optimize", "slugify": "python-slugify", "streaming": "mosaicml-streaming",
    "umap": "umap-learn", "yaml": "PyYAML", "zmq": "pyzmq",
}  # fmt: skip
# Packages with the name of their module; pip reads _ as -.
_SAME = {
    "accelerate", "albumentations", "bitsandbytes", "boto3", "click", "cloudpickle", "datasets",
    "deepspeed", "diffusers", "einops", "evaluate", "fairscale", "fire", "flash_attn", "fsspec",
    "fvcore", "h5py", "huggingface_hub", "imageio", "iopath", "jax", "joblib", "jsonargparse",
    "kornia", "librosa", "lightning", "lightning_fabric", "lightning_utilities", "lmdb",
    "matplotlib", "mlflow", "monai", "mpi4py", "netCDF4", "networkx", "nibabel", "ninja",
    "nltk", "numba", "numpy", "omegaconf", "optuna", "packaging", "pandas", "peft", "polars",
    "psutil", "pyarrow", "pycocotools", "pydicom", "pytorch_lightning", "ray", "regex",
    "requests", "rich", "safetensors", "scipy", "seaborn", "segmentation_models_pytorch",
    "sentence_transformers", "sentencepiece", "soundfile", "spacy", "submitit", "sympy",
    "tabulate", "tensorboard", "tensorboardX", "tensorflow", "termcolor", "tiktoken", "timm",
    "tokenizers", "torch", "torch_geometric", "torchaudio", "torchdata", "torchmetrics",
    "torchvision", "tqdm", "transformers", "triton", "wandb", "webdataset", "xarray",
    "xformers", "yacs", "zarr",
}  # fmt: skip
_SHORTEST = 4  # letters of a name that may be misspelt


def advice(error: str, command: Sequence[str]) -> str:
    """Return what to type after an error, each line with a new line before it.

    Empty for an error of another kind.

    Args:
        error: last line of a traceback.
        command: command of the rank, with its interpreter.
    """
    missing = _MISSING.search(error)
    if missing is None:
        return ""
    name, program = missing[1], command[0]
    python = program if "python" in os.path.basename(program) else "python"
    activate = f"\n  fix:      activate the environment with {name} before hpctrain run"
    own = {
        "apex": "from hpctrain.compat.apex import … (the same functions, on torch alone)",
        "horovod": f"{python} -m hpctrain horovod build",
    }
    if name in own:
        return f"\n  fix:      {own[name]}"
    if package := _PACKAGES.get(name) or (name if name in _SAME else ""):
        return f"{activate}\n  or:       {python} -m pip install {package}"
    top, dot, _ = name.partition(".")
    if dot:
        # Without the package itself, the error would have its name.
        return f"\n  expected: another version of {top}, or no file {top}.py before it on sys.path"
    known = [*_PACKAGES, *_SAME, *(one.name for one in pkgutil.iter_modules())]
    if meant := _misspelt(name, known):
        return f"\n  expected: did you mean {meant}?"
    return f"\n  expected: {name} in the environment of {python}{activate}"


def _misspelt(name: str, known: Iterable[str]) -> str:
    """Return a known name that differs by one letter, or by two that are swapped; else empty."""
    near = {one for one in known if abs(len(one) - len(name)) < 2 and len(one) >= _SHORTEST}
    return min((one for one in near if _is_one_edit(name, one)), default="")


def _is_one_edit(one: str, other: str) -> bool:
    short, long = sorted((one, other), key=len)
    pairs = enumerate(zip(short, long, strict=False))
    same = next((at for at, (mine, its) in pairs if mine != its), len(short))
    rest, longer = short[same:], long[same:]
    swapped = rest[:2] == longer[1::-1] and rest[2:] == longer[2:]
    return rest == longer[1:] or rest[1:] == longer[1:] or swapped
