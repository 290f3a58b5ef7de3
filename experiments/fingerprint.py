"""What tells weights from others': a digest of all that is in memory, or of samples where that would be a terabyte."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from probe.engine import Weights
from probe.weights import weight_sites

SAMPLE = 64
"""Bytes out of the middle of each stored tensor."""


def fingerprint(weights: Weights) -> str:
    """What tells weights from others', 32 hexadecimal digits.

    Of weights in memory it covers every byte, with names, dtypes and shapes. Of a checkpoint that is read as a run
    goes, it covers the names, sizes and headers of its files and 64 bytes out of the middle of every tensor: it tells
    models, fine-tunes and formats apart, and sees a tensor that was trained on or replaced; values changed by hand
    elsewhere in a tensor it does not see. So one model kept in two ways, or in two dtypes, has two. Weights that have a
    ``fingerprint`` of their own say it themselves.
    """
    own = getattr(weights, "fingerprint", None)
    if own is not None:
        return str(own)
    directory = getattr(weights, "directory", None)
    if weights.resident or directory is None:
        return _of_values(weights)  # anew each time: they may have been written into
    if weights not in _opened:
        _opened[weights] = _of_files(Path(directory))
    return _opened[weights]


_opened: WeakKeyDictionary[Weights, str] = WeakKeyDictionary()
"""Of each open checkpoint: the samples of a hundred thousand tensors take seconds."""


def _of_values(weights: Weights) -> str:
    digest = blake2b(digest_size=16)
    for block, leaf in weight_sites(weights.dims):
        values = weights.read(block, leaf.name).detach().cpu().contiguous()
        digest.update(repr((block, leaf.name, values.dtype, tuple(values.shape))).encode())
        digest.update(values.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _of_files(directory: Path) -> str:
    digest = blake2b(digest_size=16)
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
            digest.update(repr((path.name, path.stat().st_size)).encode() + header)
            start = 8 + len(header)
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    first, end = entry["data_offsets"]
                    size = min(SAMPLE, end - first)
                    file.seek(start + (first + end - size) // 2)
                    digest.update(file.read(size))
    return digest.hexdigest()
