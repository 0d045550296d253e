"""Ways in which a checkpoint's folder is not what was saved."""

from __future__ import annotations

import os
import pickle

from torch.distributed.checkpoint import FileSystemReader


def cut(folder: str, name: str) -> None:
    """Cut the file ``name`` to half its length."""
    path = os.path.join(folder, name)
    os.truncate(path, os.path.getsize(path) // 2)


def remove(folder: str, name: str) -> None:
    os.remove(os.path.join(folder, name))


def forget_shard(folder: str, name: str) -> None:
    """Take the last shard of the first tensor with ``name`` in its key out of the checkpoint's metadata."""
    metadata = FileSystemReader(folder).read_metadata()
    key = min(key for key in metadata.state_dict_metadata if name in key)
    shard = metadata.state_dict_metadata[key].chunks.pop()
    metadata.storage_data = {
        index: data
        for index, data in metadata.storage_data.items()
        if (index.fqn, index.offset) != (key, shard.offsets)
    }
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        pickle.dump(metadata, file)
