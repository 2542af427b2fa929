"""Commands that install what is missing, as they work where Baton came from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlparse

from serving.gpu_slots import has_gpu

DISTRIBUTION: Final = "baton-llm"
TORCH_INDEX: Final = "https://download.pytorch.org/whl/cpu"
"""Has builds of torch for machines without a GPU. Others come with gigabytes of CUDA."""
_WITH_TORCH: Final = frozenset(("worker", "gguf", "gpu", "dev"))


def install_line(*extras: str, flags: str = "") -> str:
    """The command of pip that adds extras to this installation.

    Args:
        extras: names of extras of `baton-llm`; none for the whole without any.
        flags: of pip, with a space after each.
    """
    wanted = f"[{','.join(extras)}]" if extras else ""
    origin = _origin()
    if origin.startswith("file:") and (folder := Path(unquote(urlparse(origin).path))).is_dir():
        what = f"-e '{folder}{wanted}'"
    elif origin:
        what = f"'{DISTRIBUTION}{wanted} @ {origin}'"
    else:
        what = f"'{DISTRIBUTION}{wanted}'"
    needs_index = not (_WITH_TORCH.isdisjoint(extras) or has_gpu())
    return f"pip install {flags}{what}" + (
        f" --extra-index-url {TORCH_INDEX}" if needs_index else ""
    )


def _origin() -> str:
    """Where this installation came from, as a URL; "" for an index (PEP 610)."""
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file():
        return root.as_uri()
    try:
        origin = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        return str(json.loads(origin)["url"]) if origin else ""
    except (metadata.PackageNotFoundError, ValueError, KeyError):
        return ""
