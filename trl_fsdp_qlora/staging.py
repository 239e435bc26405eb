"""Folders that are there whole or not at all.

A folder is filled under `_saving/` beside its final place, flushed to the disk, and renamed: whoever is killed at any
moment leaves either the whole folder or something under `_saving/`, which nothing reads and the next save clears away.
The name starts with an underscore because uploads to the hub leave such names out.
"""

import json
import os
import re
import shutil
from collections.abc import Callable

from .logging import get_logger

logger = get_logger(__name__)

STAGING = "_saving"
RECORD = "qlora_state.json"
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


def start_staging(parent: str) -> str:
    """An empty folder to fill, beside the final place; what an earlier, killed save left is removed."""
    staging = os.path.join(parent, STAGING)
    shutil.rmtree(staging, ignore_errors=True)
    os.makedirs(staging)
    return staging


def end_staging(parent: str) -> None:
    shutil.rmtree(os.path.join(parent, STAGING), ignore_errors=True)


def flush(folder: str) -> None:
    """Force every file under `folder`, and the folders, to the disk, as readable as any file this process makes."""
    umask = os.umask(0o022)
    os.umask(umask)
    for root, _, files in os.walk(folder, topdown=False):
        for name in files:
            os.chmod(os.path.join(root, name), 0o666 & ~umask)  # safetensors makes files for the owner alone
            _sync(os.path.join(root, name))
        _sync(root)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: str, value) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, sort_keys=True)
        file.write("\n")


def publish(staged: str, final: str) -> None:
    """Move the complete, flushed folder `staged` to `final`. An older `final` gives way and is removed."""
    parent = os.path.dirname(os.path.abspath(final))
    if os.path.lexists(final):
        os.rename(final, os.path.join(parent, STAGING, "replaced"))
    os.rename(staged, final)
    _sync(parent)


def publish_files(staged: str, folder: str) -> None:
    """Move every flushed file of `staged` into `folder`, each replacing an older one as a whole."""
    for root, _, files in os.walk(staged):
        target = os.path.normpath(os.path.join(folder, os.path.relpath(root, staged)))
        os.makedirs(target, exist_ok=True)
        for name in files:
            os.replace(os.path.join(root, name), os.path.join(target, name))
        _sync(target)


def remove(folder: str) -> None:
    """Remove `folder` without ever leaving a part of it under its own name."""
    staging = os.path.join(os.path.dirname(os.path.abspath(folder)), STAGING)
    os.makedirs(staging, exist_ok=True)
    doomed = os.path.join(staging, f"removed-{os.path.basename(folder)}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def checkpoints(parent: str) -> list[str]:
    """The folders `checkpoint-N` in `parent`, by step."""
    found = [(int(match[1]), match[0]) for name in os.listdir(parent) if (match := _CHECKPOINT.fullmatch(name))]
    paths = [os.path.join(parent, name) for _, name in sorted(found)]
    return [path for path in paths if os.path.isdir(path)]


def rescue(parent: str, is_complete: Callable[[str], bool]) -> None:
    """Give checkpoints their place that were written whole when the run was killed just before the rename."""
    staging = os.path.join(parent, STAGING)
    if not os.path.isdir(staging):
        return
    for staged in checkpoints(staging):
        final = os.path.join(parent, os.path.basename(staged))
        if is_complete(staged) and not os.path.lexists(final):
            logger.info("%s was complete when its run ended; it is in its place now.", final)
            os.rename(staged, final)
    end_staging(parent)


def rotate(parent: str, limit: int | None, keep: set[str]) -> None:
    """Remove the oldest checkpoints in `parent` until `limit` are left; those in `keep` always stay."""
    if not limit or limit < 0:
        return
    found = checkpoints(parent)
    keep = {os.path.abspath(path) for path in keep}
    removable = sorted((path for path in found if os.path.abspath(path) not in keep), key=os.path.getmtime)
    for path in removable[: max(0, len(found) - limit)]:
        remove(path)
    end_staging(parent)
