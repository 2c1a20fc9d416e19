"""Finds a model: the demo inside the package, a directory, a GGUF file, or one on the Hugging Face hub."""

from __future__ import annotations

import errno
import os
import re
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from stat import S_ISDIR
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from . import background, files, gguf
from .errors import FileError, ModelError, QuantspecError, UsageError, reason
from .prompts import check_utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

DEMO = "demo"

# Files that a plan needs.
DESCRIPTION = [
    "config.json",
    "generation_config.json",
    # Quantised models whose config.json does not say so have one of these.
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
]

# Weights, configuration and tokenizer. Excludes code, pickles, and the second copy of the weights in some repositories.
FILES = [
    *DESCRIPTION,
    # Old GPTQ models call the weights so.
    "gptq_model-*.safetensors",
    # Downloaded so that a model with an adapter is refused.
    "adapter_config.json",
    "model.safetensors",
    # Shards, called model-00001-of-00002.safetensors or model.safetensors-00001-of-00002.safetensors.
    "model*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    # SentencePiece's, if there is no tokenizer.json.
    "tokenizer.model",
    "added_tokens.json",
    "tokenizer_config.json",
    # Special tokens of old checkpoints.
    "special_tokens_map.json",
    "chat_template.jinja",
    # That of some models with a vision tower.
    "chat_template.json",
]

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")

# Errors of the disk, or of missing rights to write there.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}

_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")

# The HTTP libraries' names for a broken connection, which is retried; other errors are not.
_BROKEN = {
    "TimeoutException",
    "NetworkError",
    "RemoteProtocolError",
    "ConnectionError",
    "Timeout",
    "ChunkedEncodingError",
}

_AGAIN = "run the command again: it resumes"
_SET_UP = "check the network, HTTPS_PROXY, HF_ENDPOINT and HF_TOKEN"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class _AmbiguousError(ModelError):
    """Several files fit a model's name."""


def demo() -> Path:
    """The model that ships with the package."""
    return Path(__file__).with_name("demo")


def resolve(model: str | None, *, revision: str | None = None, offline: bool = False, progress: bool = False) -> Path:
    """The directory or GGUF file of a model, downloaded if necessary.

    `model` is a directory, a GGUF file, a hub id, `id@revision`, or `id:NAME` for one of several GGUF files; None is the
    demo model, and so is "demo" if there is no such path. `progress` shows download bars.
    """
    return _resolve(model, revision, _from_hub, offline=offline, progress=progress)


def describe(model: str | None, *, revision: str | None = None, offline: bool = False, progress: bool = False) -> Path:
    """As `resolve`, but for a model on the hub only `DESCRIPTION` is downloaded. A GGUF file must be in the cache already."""
    return _resolve(model, revision, _described, offline=offline, progress=progress)


def files_on_disk(*models: str | None) -> list[str]:
    """The files of models given by a path, which no output may replace: those of a directory, or all parts of a GGUF file."""
    found: list[str] = []
    for model in filter(None, models):
        path = os.path.expanduser(model)
        try:
            names = os.listdir(path)
        except (OSError, ValueError):  # a file or no path; `resolve` reports a directory that cannot be read
            found += gguf.parts(path)
        else:
            # A directory may also hold the user's files, such as an earlier output.
            patterns = [*FILES, "*.safetensors", f"*{gguf.SUFFIX}"]
            own = [name for name in names if any(fnmatchcase(name.lower(), pattern) for pattern in patterns)]
            found += [os.path.join(path, name) for name in own]
    return found


def absolute(model: str | None) -> str | None:
    """The name of a model for processes in other folders: a path becomes absolute, a hub id stays."""
    path = os.path.expanduser(model or "")
    return os.path.abspath(path) if model and files.status(path) is not None else model


def _resolve(
    model: str | None, revision: str | None, from_hub: Callable[..., Path], *, offline: bool, progress: bool
) -> Path:
    if model is None:
        if revision is not None:
            raise UsageError("--revision without --model", "name the hub id the revision belongs to", option="revision")
        return demo()
    if not model:
        raise UsageError("the name of the model is empty", "name a directory or a hub id", option="model")
    check_utf8("the name of the model", model, "rename the directory, or give a link to it")
    _check_revision(revision)
    # Not Path.expanduser: it raises for an unknown user, or if no home directory is known.
    path = os.path.expanduser(model)
    found = files.status(path)
    if found is not None:
        return _of_disk(model, path, revision, is_directory=S_ISDIR(found.st_mode))
    _refuse_suffix_of_file(model, path)
    repository, wanted, pinned = _of_id(model)
    if repository == DEMO:
        if revision is not None:
            raise UsageError(
                f"--revision {revision} with the demo model", "the demo model has no revisions", option="revision"
            )
        if model != DEMO:
            raise UsageError(
                f"model {model}, but the demo model has no revisions and no files to choose from",
                f"give {DEMO} alone",
                option="model",
            )
        return demo()
    if pinned is not None and revision is not None and pinned != revision:
        raise UsageError(f"two revisions: {pinned} and {revision}", "give one of them", option="revision")
    _check_revision(pinned)
    if cache().parts[:1] == ("~",):
        raise FileError("the hub's cache has no folder: no home directory is known", "set HF_HOME to a folder")
    return from_hub(model, repository, wanted, revision or pinned, offline=offline, progress=progress)


def _of_disk(model: str, path: str, revision: str | None, *, is_directory: bool) -> Path:
    """The directory or GGUF file at a path that exists."""
    kind = "directory" if is_directory else "file"
    if not is_directory and not path.lower().endswith(gguf.SUFFIX):
        raise ModelError(
            f"model {model} is a file that is not called {gguf.SUFFIX}",
            "give a GGUF file, or the directory that holds config.json and the weights",
            option="model",
        )
    if revision is not None:
        raise UsageError(
            f"--revision {revision} with the {kind} {model}", f"a {kind} has no revisions", option="revision"
        )
    return _weights_of(model, Path(path)) if is_directory else Path(path)


def _refuse_suffix_of_file(model: str, path: str) -> None:
    """Refuses `FILE:NAME` and `FILE@REVISION`, which would be requested from the hub."""
    for mark in ":@":
        file, found, suffix = path.rpartition(mark)
        if found and files.is_file(Path(file)):
            raise UsageError(
                f"model {model} names a file and {mark}{suffix}",
                f"give the file alone; {mark} selects from a repository of the hub",
                option="model",
            )


def _of_id(model: str) -> tuple[str, str, str | None]:
    """Repository, NAME of a GGUF file ("" for none) and revision of a hub id; an error if it reads like a path."""
    name, _, pinned = model.partition("@")
    repository, colon, wanted = name.partition(":")
    what = "file" if model.lower().endswith(gguf.SUFFIX) else "directory"
    if (
        not _HUB_ID.fullmatch(repository)
        or "--" in repository
        or ".." in repository
        or (colon and wanted[:1] in {"", "/"})
        or (what == "file" and "/" not in repository)
    ):
        raise ModelError(
            f"model {what} {model} does not exist",
            "check the path, or give a hub id such as owner/name",
            option="model",
        )
    return repository, wanted, pinned or None


def _described(
    model: str, repository: str, wanted: str, revision: str | None, *, offline: bool, progress: bool
) -> Path:
    """The folder of a repository's config.json, or its GGUF file in the cache."""
    if not wanted:
        directory = _fetch(model, repository, revision, DESCRIPTION, offline=offline, progress=progress)
        if files.is_file(directory / "config.json"):
            return directory
    try:
        return _from_hub(model, repository, wanted, revision, offline=True, progress=False)
    except _AmbiguousError:
        raise
    except ModelError as error:
        raise ModelError(
            f"no GGUF file of {model} has been downloaded"
            if wanted
            else f"{model} on the hub has no config.json, and no GGUF file of it has been downloaded",
            "name the repository of the model that it was made of, or download it first",
            option="model",
        ) from error


def _from_hub(model: str, repository: str, wanted: str, revision: str | None, *, offline: bool, progress: bool) -> Path:
    """The folder of a repository's safetensors, or its GGUF file: the only one, or the one with `wanted` in its name."""
    if not wanted:
        directory = _fetch(model, repository, revision, FILES, offline=offline, progress=progress)
        if any(files.is_file(directory / weights) for weights in _WEIGHTS):
            return directory
    known, from_cache = _names(model, repository, revision, offline=offline)
    models = gguf.models(known)
    names = [name for name in models if not wanted or _is_called(name, wanted)]
    if names:
        chosen = _only(repository, names, f"{repository}:NAME with a part of its name, such as Q8_0")
        folder = _fetch(model, repository, revision, gguf.parts(chosen), offline=offline, progress=progress)
        return _present(folder / chosen)
    if from_cache and (wanted or not any(name.endswith(".safetensors") for name in known)):
        what = f"no GGUF file called {wanted}" if wanted else "no weights"
        raise _not_in_cache(f"the cache {cache()} has {what} of {repository}", offline=offline or _is_offline())
    if wanted:
        hint = f"it has {_listed(models)}" if models else "check its files on the hub"
        raise ModelError(f"{repository} has no GGUF file called {wanted}", hint, option="model")
    if not files.is_file(directory / "config.json"):
        raise ModelError(
            f"{model} on the hub has no config.json",
            "choose a repository with safetensors or GGUF weights, not adapters",
        )
    return directory


def _weights_of(model: str, directory: Path) -> Path:
    """The directory, or its only GGUF file if it has no other weights."""
    if any(files.is_file(directory / name) for name in _WEIGHTS):
        return directory
    try:
        names = gguf.models(os.listdir(directory))
    except OSError as error:
        raise files.unreadable(directory, error) from error
    if not names:
        return directory
    return _present(directory / _only(model, names, f"one of these files, such as {directory / names[0]}"))


def _present(path: Path) -> Path:
    """A GGUF file, if it is there: of a split model, some later part may be there alone."""
    if not files.is_file(path):
        raise ModelError(f"{path} is missing", "the download is incomplete; fetch the missing file", option="model")
    return path


def _only(place: str, names: list[str], choice: str) -> str:
    """The only model of those found."""
    if len(names) > 1:
        message = f"{place} holds {len(names)} GGUF models: {_listed(names)}"
        raise _AmbiguousError(message, f"give {choice}", option="model")
    return names[0]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")


def _is_called(name: str, wanted: str) -> bool:
    """True if `wanted` is a part of a file's name between dashes and dots, like Q8_0 in model-Q8_0.gguf."""
    return re.search(rf"(^|[-./]){re.escape(wanted)}([-./]|$)", name, re.IGNORECASE) is not None


def _check_revision(revision: str | None) -> None:
    if revision is None:
        return
    hint = "give a branch, tag or commit on the hub"
    if not isinstance(revision, str):
        raise UsageError(f"--revision is {revision!r:.60}", hint, option="revision")
    check_utf8("--revision", revision, hint)
    # The revision becomes part of a path in the cache.
    if ".." in revision.split("/"):
        raise UsageError(f"--revision {revision} has a part ..", hint, option="revision")


def cache() -> Path:
    """The folder of downloaded models (HF_HOME, HF_HUB_CACHE)."""
    return Path(hub_settings().HF_HUB_CACHE)


def hub_settings() -> ModuleType:
    """The hub library's settings, which it reads from variables at import."""
    try:
        from huggingface_hub import constants
    except ValueError as error:
        _check_endpoint(os.environ.get("HF_ENDPOINT"))
        wrong = [name for name, value in os.environ.items() if name.startswith("HF_") and repr(value) in str(error)]
        raise UsageError(
            f"{' and '.join(wrong) or 'a variable HF_*'}: {error}", "correct the variable, or unset it"
        ) from error
    return constants


def _check_endpoint(address: str | None) -> None:
    """Refuses an invalid hub address: errors of the hub library do not name the variable."""
    if not address:
        return
    try:
        parts = urlsplit(address)
        good = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:  # brackets, or a port out of range
        good = False
    if not good:
        raise UsageError(f"HF_ENDPOINT is {address!r}", "give an address such as https://huggingface.co, or unset it")


def _fetch(
    model: str, repository: str, revision: str | None, patterns: list[str], *, offline: bool, progress: bool
) -> Path:
    """Downloads the files of a repository that match these patterns. Returns their folder."""
    _check_endpoint(os.environ.get("HF_ENDPOINT"))
    from huggingface_hub import snapshot_download

    offline = offline or _is_offline()
    with _bars(shown=progress), _download_errors(model, repository, revision, offline=offline):
        directory = background.run(
            lambda: snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                local_files_only=offline,
                library_name="quantspec",
            )
        )
    return Path(directory)


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """Turns the hub library's progress bars off for a download. The program may use them for its own."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    changed = not (shown or are_progress_bars_disabled())
    if changed:
        disable_progress_bars()
    try:
        yield
    finally:
        if changed:
            enable_progress_bars()


def _is_offline() -> bool:
    """Whether HF_HUB_OFFLINE is set."""
    return bool(hub_settings().HF_HUB_OFFLINE)


def _names(model: str, repository: str, revision: str | None, *, offline: bool) -> tuple[list[str], bool]:
    """Names of the files of a repository; of those in the cache, and true, if it is offline or cannot be reached."""
    _check_endpoint(os.environ.get("HF_ENDPOINT"))
    from huggingface_hub import HfApi

    if not (offline or _is_offline()):
        with _download_errors(model, repository, revision, offline=False):
            try:
                found = background.run(
                    lambda: HfApi(library_name="quantspec").model_info(repository, revision=revision)
                )
                return [file.rfilename for file in found.siblings or []], False
            except Exception as error:
                if not _is_broken(error):
                    raise
    folder = _fetch(model, repository, revision, [], offline=offline, progress=False)
    return [str(path.relative_to(folder)) for path in folder.rglob("*")], True


def _not_in_cache(message: str, *, offline: bool) -> ModelError:
    """The error for files that are not in the cache, if the hub is not to be asked or cannot be reached."""
    if offline:
        return ModelError(
            message,
            "leave out --offline, unset HF_HUB_OFFLINE and QUANTSPEC_OFFLINE, or give a directory",
            option="model",
        )
    return ModelError(
        f"{message}, and the hub cannot be reached",
        "check the network, HTTPS_PROXY and HF_ENDPOINT, or give a directory with the model's files",
        option="model",
    )


@contextmanager
def _download_errors(model: str, repository: str, revision: str | None, *, offline: bool) -> Iterator[None]:
    """Converts errors of the hub to errors that name the requested model."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"model {model} is gated",
            "accept its licence on huggingface.co and set HF_TOKEN to a token of that account",
            option="model",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"model {repository} has no revision {revision}", "check the revision on the hub", option="revision"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"neither a directory nor a model on the hub is called {model}",
            "check the name; a private model needs HF_TOKEN",
            option="model",
        ) from error
    except errors.HFValidationError as error:
        raise ModelError(f"{model} is no valid hub id", "a hub id looks like owner/name", option="model") from error
    except errors.LocalEntryNotFoundError as error:
        # Recent versions of the library know which files of a repository are missing.
        partly = type(error).__name__ == "IncompleteSnapshotError"
        where = f"only a part of model {model} is" if partly else f"model {model} is neither a directory nor"
        raise _not_in_cache(f"{where} in the cache {cache()}", offline=offline) from error
    except OSError as error:
        raise _refused(model, error) from error
    except (QuantspecError, MemoryError):
        raise
    except Exception as error:
        raise ModelError(
            f"downloading {model} failed: {type(error).__name__}: {error}", _AGAIN if _is_broken(error) else _SET_UP
        ) from error


def _is_broken(error: Exception) -> bool:
    """True for a broken connection, which is worth a retry."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & _BROKEN) and "ProxyError" not in names


def _refused(model: str, error: OSError) -> QuantspecError:
    """The error for a refusal of the system or the network, with its remedy."""
    import ssl  # takes 15 ms, needed after a failed download only

    message = f"downloading {model} failed: {reason(error)}"
    if isinstance(error, ssl.SSLError) or (error.errno == errno.ENOENT and any(map(os.environ.get, _CERTIFICATES))):
        return ModelError(message, f"check {', '.join(_CERTIFICATES)}")
    # Network errors are OSErrors without a number, or of these kinds; wrong addresses are ValueErrors.
    if error.errno is None or isinstance(error, ConnectionError | TimeoutError):
        wrong = isinstance(error, ValueError) or "ProxyError" in type(error).__name__
        return ModelError(f"downloading {model} failed: {error}", _SET_UP if wrong else _AGAIN)
    if error.errno in _DISK:
        hint = "free some space or set HF_HOME to another disk, then run the command again: it resumes"
        return FileError(message, hint)
    place = "" if error.filename is None else f": {error.filename}"
    return FileError(f"{message}{place}", "check HF_HOME, HF_TOKEN_PATH and --revision")
