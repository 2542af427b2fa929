"""Fetches models from a Hugging Face hub.

The library's own variables hold: `HF_ENDPOINT` names another hub, `HF_TOKEN` a token for private
and gated models, `HF_HOME` the folder of its cache, and `HF_HUB_OFFLINE` keeps it off the network.
What is in the cache already is not fetched again, and serves where the hub cannot be reached.

`ORG/NAME@REVISION` pins a model: a commit's hash always means the same files, and a branch or a tag
what it means now. Without it the hub's main branch is taken.
"""

from __future__ import annotations

import os
from typing import Any, Final

from serving.models.demo_model import Progress

HUB: Final = "https://huggingface.co"
FILES: Final = ("*.json", "tokenizer*", "*.jinja", "*.model")
WEIGHTS: Final = "*.safetensors"
COPIES: Final = ("*/*", "consolidated*")
"""Files with a second copy of the weights, for other software."""


class HubError(Exception):
    """A model could not be fetched; the message says what to do."""


def fetch(model_id: str, progress: Progress, *, weights: bool = True) -> str:
    """Returns the folder with the model's files. Fetches those that are not in the cache.

    Args:
        model_id: such as `Qwen/Qwen3-8B` or `Qwen/Qwen3-8B@REVISION`.
        progress: is called with the share of the bytes that is there.
        weights: whether the weights are wanted.

    Raises:
        HubError: there is no such model, it may not be read, the hub cannot be reached, or the disk
            is full.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    hub = os.environ.get("HF_ENDPOINT") or HUB
    repository, _, revision = model_id.partition("@")
    try:
        return snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=[*FILES, WEIGHTS] if weights else list(FILES),
            ignore_patterns=list(COPIES),
            endpoint=hub,
            tqdm_class=_reporter(f"fetching {model_id}", progress),
        )
    except HFValidationError:
        raise HubError(
            f"{model_id!r} is no folder, no GGUF file and no id like ORG/NAME or ORG/NAME@REVISION"
        ) from None
    except HfHubHTTPError as error:
        raise HubError(_refused(model_id, hub, error)) from None
    except LocalEntryNotFoundError:
        raise HubError(
            f"{model_id} is no folder here and not in the cache, and the hub ({hub}) cannot be "
            "reached: HF_ENDPOINT names another one, HF_HUB_OFFLINE=1 forbids all"
        ) from None
    except OSError as error:
        raise HubError(f"{model_id} could not be fetched: {error.strerror or error}") from None


def _refused(model_id: str, hub: str, error: Any) -> str:
    """Says why the hub did not answer as it was asked to."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    has_token = bool(get_token())
    if isinstance(error, GatedRepoError):
        then = "the account of HF_TOKEN must be let in" if has_token else "then set HF_TOKEN"
        return f"{model_id} is gated: ask for access at {hub}/{model_id}; {then}"
    if isinstance(error, RevisionNotFoundError):
        return f"{model_id}: {hub} has the model, and not this revision of it"
    if isinstance(error, RepositoryNotFoundError):
        advice = (
            "HF_TOKEN's account may not read it" if has_token else "set HF_TOKEN if it is private"
        )
        return f"{model_id} is no folder here, and at {hub} it is not found or private: {advice}"
    status = error.response.status_code if error.response is not None else "no answer"
    if status == 401:
        return f"{hub} does not accept HF_TOKEN (status 401)"
    return f"{hub} cannot give {model_id} now (status {status})"


def _reporter(doing: str, progress: Progress) -> Any:
    """A progress bar for the library that draws nothing and reports the bytes on disk."""
    from tqdm.auto import tqdm

    class Reporter(tqdm):  # type: ignore[misc]  # it has no types
        def display(self, *_: Any, **__: Any) -> bool:
            if self.unit == "B" and self.total:
                progress(doing, min(1.0, self.n / self.total))
            return True

        def clear(self, *_: Any, **__: Any) -> None:
            pass

    return Reporter
