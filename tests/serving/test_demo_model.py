"""The demo model: made once, complete or not there, and able to answer."""

from __future__ import annotations

import json
import threading
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from serving.models import demo_model as demo
from serving.models import finding


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Fakes the download and the conversion, and counts them."""
    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    calls: list[str] = []

    def download(scratch: Path, report: demo.Progress) -> Path:
        calls.append("download")
        return scratch / "model.gguf"

    def convert(gguf: Path, target: Path, report: demo.Progress) -> None:
        calls.append("convert")
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(demo, "_download", download)
    monkeypatch.setattr(demo, "_convert_apart", convert)
    return calls


def test_it_is_made_once(made: list[str], tmp_path: Path) -> None:
    (tmp_path / "models" / f".{demo.MODEL_NAME}-of-one-that-was-killed").mkdir(parents=True)
    first = demo.ensure()
    assert not [*first.parent.glob(".*")]
    assert first == demo.ensure() == tmp_path / "models" / demo.MODEL_NAME
    assert made == ["download", "convert"]
    assert finding.find("demo") == (str(first), demo.MODEL_NAME)


def test_an_environment_without_pip_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def not_there(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setenv("BATON_CACHE", str(tmp_path))
    monkeypatch.setattr("importlib.metadata.version", not_there)
    with pytest.raises(demo.DemoModelError, match="ensurepip"):
        demo.ensure()


def test_two_at_once_make_it_once(made: list[str]) -> None:
    threads = [threading.Thread(target=demo.ensure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["download", "convert"]


def test_a_folder_that_is_incomplete_or_old_is_made_again(made: list[str]) -> None:
    folder = demo.ensure()
    (folder / "config.json").write_text("{")
    (folder / "config.json").unlink()
    demo.ensure()
    marker = folder / demo.MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 0}))
    demo.ensure()
    assert made.count("convert") == 3


def test_a_folder_of_before_gets_the_template_with_tools(made: list[str]) -> None:
    """It is not made again, and it says the same where there are no tools."""
    folder = demo.ensure()
    marker = folder / demo.MARKER
    (folder / demo.TEMPLATE).write_text("{{ messages }}")
    told = json.loads(marker.read_text())
    told["bytes"][demo.TEMPLATE] = len("{{ messages }}")
    marker.write_text(json.dumps(told))
    assert demo.ensure() == folder
    assert (folder / demo.TEMPLATE).read_text() == demo.OWN_TEMPLATE.read_text()
    assert demo.is_ready(folder)
    assert made == ["download", "convert"]


def test_a_failure_leaves_nothing(
    made: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(gguf: Path, target: Path, report: demo.Progress) -> None:
        target.mkdir()
        raise demo.DemoModelError("no room")

    monkeypatch.setattr(demo, "_convert_apart", fail)
    with pytest.raises(demo.DemoModelError):
        demo.ensure()
    assert [path.name for path in (tmp_path / "models").iterdir()] == [f"{demo.MODEL_NAME}.lock"]


@pytest.mark.parametrize(
    ("line", "share"),
    [("Progress 5 of 10\n", 0.5), ("Saved ./x.whl", None), ("Progress 0 of 0", None)],
)
def test_pips_progress_is_read(line: str, share: float | None) -> None:
    assert demo._share(line) == share


@pytest.mark.model
def test_the_real_one_answers(demo_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    assert tokenizer("1234").input_ids == [33, 34, 35, 36]
    assert tokenizer.decode(tokenizer("Zürich 東京").input_ids) == "Zürich 東京"
    model = AutoModelForCausalLM.from_pretrained(demo_model)
    assert model.dtype == torch.float32
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("version", "form"), [("23.2.1", "off"), ("24.0", "off"), ("24.1", "raw"), ("26.0.dev1", "raw")]
)
def test_an_old_pip_is_asked_for_no_progress(monkeypatch, version, form) -> None:
    monkeypatch.setattr(demo.metadata, "version", lambda name: version)
    assert demo._progress_bar() == form
