"""Where a checkpoint lies: a local folder, or a Hugging Face repository through its cache."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import CheckpointError, reason

# Weights in other formats, which no one here reads.
_NOT_NEEDED = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.msgpack", "*.h5", "*.onnx", "original/*"]
_REPO_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")


def locate(
    path_or_repo: str | Path,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    token: str | bool | None = None,
    offline: bool | None = None,
) -> Path:
    """The local folder of a checkpoint, downloaded first where it is a repository id.

    revision: branch, tag or commit. token: as huggingface_hub takes it. offline: True reads the cache
    only; None follows huggingface_hub (HF_HUB_OFFLINE). Raises CheckpointError where there is neither a
    folder nor a repository, or it cannot be had.
    """
    path = Path(path_or_repo).expanduser()
    if path.is_dir():
        return path
    name = str(path_or_repo)
    if path.exists():
        raise CheckpointError(f"{name}: a file, expected the folder of a checkpoint")
    if isinstance(path_or_repo, Path) or not _REPO_ID.fullmatch(name):
        raise CheckpointError(f"{name}: no such folder, and no Hugging Face repository id")
    return _snapshot(name, revision, cache_dir, token, offline)


def _snapshot(
    repo: str,
    revision: str | None,
    cache_dir: str | Path | None,
    token: str | bool | None,
    offline: bool | None,
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f"{repo} (revision {revision})" if revision else repo
    try:
        found = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache_dir,
            token=token,
            local_files_only=bool(offline),
            ignore_patterns=_NOT_NEEDED,
        )
    except LocalEntryNotFoundError as error:
        # Whatever kept the hub from answering, a text of the network would hide that the folder is missing.
        asked = not offline and not isinstance(error.__cause__, OfflineModeIsEnabled)
        why = "the hub cannot be asked" if asked else "offline"
        raise CheckpointError(f"{at}: no such folder, and not in the Hugging Face cache ({why})") from error
    except GatedRepoError as error:
        raise CheckpointError(f"{at}: access needs a token that was granted it") from error
    except RevisionNotFoundError as error:
        raise CheckpointError(f"{at}: no such revision") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(f"{at}: no such folder, and no such repository, or no access to it") from error
    except Exception as error:  # of whatever library this version of huggingface_hub asks the network with
        raise CheckpointError(f"{at}: cannot be downloaded: {reason(error)}") from error
    return Path(found)
