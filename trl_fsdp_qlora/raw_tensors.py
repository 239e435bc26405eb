"""The bytes of safetensors files: which tensor lies where, and a copy of a file with some of them replaced."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .provenance import read_json
from .training_state import open_tensors

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class Entry:
    """A tensor in a safetensors file: where its bytes are, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def weight_files(folder: str) -> list[str]:
    """The safetensors files of a checkpoint.

    Raises:
        ValueError: if there are none, or one that the index lists is missing.
    """
    index = os.path.join(folder, INDEX)
    if os.path.isfile(index):
        names = sorted(set(read_json(index)["weight_map"].values()))
    elif os.path.isfile(os.path.join(folder, SINGLE)):
        names = [SINGLE]
    else:
        raise ValueError(f"{folder} holds neither {SINGLE} nor {INDEX}: a merge needs the 16-bit base as safetensors.")
    for name in names:
        if not os.path.isfile(os.path.join(folder, name)):
            raise ValueError(f"{os.path.join(folder, name)} is missing, though {index} lists it. Fetch the base again.")
    return names


def read_head(path: str) -> tuple[bytes, list[Entry]]:
    """The head of a safetensors file as bytes, and its tensors in the order of their bytes."""
    with open_tensors(path), open(path, "rb") as file:  # the first checks that the file is whole
        length = file.read(8)
        text = file.read(struct.unpack("<Q", length)[0])
    entries = []
    for name, info in json.loads(text).items():
        if name != "__metadata__":
            start, end = (len(length) + len(text) + offset for offset in info["data_offsets"])
            entries.append(Entry(name, info["dtype"], tuple(info["shape"]), start, end))
    return length + text, sorted(entries, key=lambda entry: entry.start)


def merge_file(source: str, target: str, merged: dict[str, Callable[[], torch.Tensor]]) -> Iterator[int]:
    """Write `source` to `target` with what `merged` gives in place of the tensors it names; yields bytes as they are written."""
    head, entries = read_head(source)
    with open(source, "rb") as reader, open(target, "wb") as writer:
        writer.write(head)
        yield len(head)
        for entry in entries:
            left = entry.end - entry.start
            if entry.name in merged:
                tensor = merged[entry.name]().contiguous().view(-1).view(torch.uint8)
                if len(tensor) != left:
                    raise ValueError(f"The merged {entry.name!r} has {len(tensor)} bytes, and {left} in {source}.")
                writer.write(tensor.numpy())
                yield left
                continue
            reader.seek(entry.start)
            while left:
                chunk = reader.read(min(left, _CHUNK))
                writer.write(chunk)
                left -= len(chunk)
                yield len(chunk)


def read_tensor(file, entry: Entry) -> torch.Tensor:
    """The tensor `entry` of an open safetensors file.

    Raises:
        ValueError: if it is no plain floating-point weight.
    """
    if entry.dtype not in DTYPES:
        raise ValueError(f"{entry.name!r} in {file.name} is {entry.dtype}: the base is quantised. Write the 16-bit base as `base`.")
    file.seek(entry.start)
    data = bytearray(file.read(entry.end - entry.start))
    return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(entry.shape)
