"""Clients that others wrote, unchanged, against a router, a prefill and a decode worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from clients.environments import folder_of
from cluster import Cluster, make_cluster
from node_kit import install, run_program
from tool_templates import HERMES, THINKS

from serving.models.demo_model import MODEL_NAME

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]

PROGRAMS = Path(__file__).with_name("programs")
NODE = Path(__file__).with_name("node")
RUN_S = 240
QUESTION = "What is the capital of France?"
TEXT = "The capital of France is"


class Served(NamedTuple):
    """A cluster with the demo model, and what our own client gets from it."""

    url: str
    """Without /v1."""
    chat: str
    text: str


@pytest.fixture(scope="module")
def served(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(HERMES + THINKS)
    cluster: Cluster = make_cluster(
        demo_model,
        tmp_path_factory.mktemp("clients"),
        own={"router": {"chat_template": template, "batches_folder": template.parent / "kept"}},
        num_pages=600,
        max_step_tokens=512,
    )
    with cluster.started():
        with cluster.client() as client:
            chat = client.generate(
                messages=[{"role": "user", "content": QUESTION}], max_tokens=16, temperature=0.0
            )
            text = client.generate(TEXT, max_tokens=8, temperature=0.0)
        yield Served(f"http://{cluster.plan.http_address}", chat.text, text.text)
        cluster.check_baseline()


def run(*command: str | Path, **variables: str) -> str:
    """What a program writes to standard output."""
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def said_by(program: str, requirement: str, served: Served) -> dict[str, Any]:
    """The JSON in the last line of a program of `programs`."""
    python = folder_of(*requirement.split()) / "python"
    shown = run(python, PROGRAMS / program, f"{served.url}/v1", MODEL_NAME)
    said: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return said


@pytest.mark.parametrize(
    ("program", "requirement"),
    [
        ("with_openai.py", "openai"),
        ("with_litellm.py", "litellm"),
        ("with_langchain.py", "langchain-openai"),
    ],
)
def test_chat_stream_text_and_a_prompt_that_is_too_long(
    served: Served, program: str, requirement: str
) -> None:
    said = said_by(program, requirement, served)
    assert said.pop("embedded", [16, 16]) == [16, 16]
    assert said.pop("batch", served.text) == served.text
    assert said == {
        "chat": served.chat,
        "stream": served.chat,
        "text": served.text,
        "too_long": "context_length_exceeded",
    }


@pytest.mark.parametrize(
    ("program", "requirement"),
    [
        ("forms_openai.py", "openai"),
        ("forms_litellm.py", "litellm mcp"),  # It needs mcp for tools, and does not say so.
        ("forms_langchain.py", "langchain-openai"),
        ("forms_instructor.py", "instructor"),
        ("forms_huggingface_hub.py", "huggingface_hub"),
        ("forms_guidance.py", "guidance openai"),
    ],
)
def test_schemas_and_tools(served: Served, program: str, requirement: str) -> None:
    """The programs check the values against their schema; what they call and get is no text."""
    said = said_by(program, requirement, served)
    assert len(said["parsed"]) >= 2
    cities = [*said["parsed"], said.get("called", said["parsed"][0])]
    assert all(set(city) == {"name", "people"} for city in cities)
    if "finish" in said:
        assert said["finish"] == "tool_calls"
        assert said["after"] in ("stop", "length", "tool_calls"), "it was answered"


def test_lm_eval_over_the_door_and_through_llm(
    served: Served, demo_model: Path, tmp_path: Path
) -> None:
    """A generating task, whose right answers are what our own client got."""
    (questions := tmp_path / "questions.jsonl").write_text(
        "".join(
            json.dumps({"question": TEXT, "answer": answer}) + "\n"
            for answer in (served.text.split("\n")[0], "none")
        )
    )
    bin_folder = folder_of("lm-eval[api]==0.4.13")
    program = PROGRAMS / "evals_lm_eval.py"
    asked = (program, f"{served.url}/v1", MODEL_NAME, questions)
    over_the_door = run(bin_folder / "python", *asked, OPENAI_API_KEY="none")
    (packages,) = (bin_folder.parent / "lib").glob("python*/site-packages")
    here = run(sys.executable, program, "here", demo_model, questions, packages)
    for shown in (over_the_door, here):
        assert json.loads(shown.splitlines()[-1]) == {"right": 0.5}


def test_openai_in_node(served: Served) -> None:
    said = run_program("openai.mjs", f"{served.url}/v1", MODEL_NAME)
    assert said == {
        "model": MODEL_NAME,
        "chat": served.chat,
        "stream": served.chat,
        "text": served.text,
        "tooLong": [400, "context_length_exceeded", "messages"],
    }


def test_openais_client_over_responses(served: Served) -> None:
    said = said_by("responses_openai.py", "openai", served)
    assert (said["chat"], said["after"]) == (served.chat, "completed")
    assert [*said["parsed"], said["called"]] == [
        {"name": one["name"], "people": one["people"]} for one in (*said["parsed"], said["called"])
    ]
    assert set(said["several"]) == {"function_call"}
    assert said["thought"][0] == "reasoning"


def test_anthropics_client_over_messages(served: Served) -> None:
    python = folder_of("anthropic", "pydantic") / "python"
    shown = run(python, PROGRAMS / "messages_anthropic.py", served.url, MODEL_NAME)
    said = json.loads(shown.splitlines()[-1])
    assert (said["chat"], said["counted"], said["finish"]) == (served.chat, True, "tool_use")
    assert all(set(city) == {"name", "people"} for city in (*said["parsed"], said["called"]))
    assert set(said["several"]) == {"tool_use"}
    assert said["thought"][0] == "thinking"
    assert said["too_long"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("program", "requirement"),
    [
        ("doors_agents.py", "openai-agents"),
        ("doors_pydantic_ai.py", "pydantic-ai-slim[openai,anthropic]"),
        ("doors_langchain.py", "langchain-openai langchain-anthropic"),
        ("doors_litellm.py", "litellm"),
    ],
)
def test_frameworks_on_their_default_paths(served: Served, program: str, requirement: str) -> None:
    """Responses and Messages, with tools where the framework has any."""
    python = folder_of(*requirement.split()) / "python"
    said = json.loads(run(python, PROGRAMS / program, served.url, MODEL_NAME).splitlines()[-1])
    if program == "doors_litellm.py":
        assert set(said.values()) == {served.chat}
    else:
        assert json.dumps(said).count("Paris") + json.dumps(said).count("Rome") >= 2
        assert "false" not in json.dumps(said)


def test_node_and_the_ai_sdk_over_both_doors(served: Served) -> None:
    url, texts = (
        f"{served.url}/v1",
        dict.fromkeys(("whole", "streamed", "sdk", "sdkStreamed"), served.chat),
    )
    for program, base, own in (
        ("responses.mjs", url, {"steps": ["tool-calls", "tool-calls"]}),
        ("messages.mjs", served.url, {"finish": "tool_use", "thought": ["thinking", "text"]}),
    ):
        said = run_program(program, base, MODEL_NAME, folder=NODE, timeout_s=RUN_S)
        assert said.pop("called")["city"] in ("Paris", "Rome")
        assert said == {**texts, **own}


def test_a_coding_agent_that_speaks_messages(served: Served, tmp_path: Path) -> None:
    """pi, with its own system prompt and tools. The demo model cannot code: it has answered."""
    install(NODE)
    model = {"id": MODEL_NAME, "contextWindow": 8192, "maxTokens": 16}
    provider = {"baseUrl": served.url, "api": "anthropic-messages", "apiKey": "none"}
    (settings := tmp_path / ".pi" / "agent").mkdir(parents=True)
    providers = {"providers": {"baton": {**provider, "models": [model]}}}
    (settings / "models.json").write_text(json.dumps(providers))
    asked = ["-p", "--mode", "json", "--provider", "baton", "--model", MODEL_NAME, "--no-session"]
    pi = NODE / "node_modules" / ".bin" / "pi"
    shown = run("node", pi, *asked, "Say hi.", HOME=str(tmp_path), PI_OFFLINE="1")
    (ended,) = [line for line in map(json.loads, shown.splitlines()) if line["type"] == "agent_end"]
    answer = ended["messages"][-1]
    assert (answer["role"], answer["stopReason"]) == ("assistant", "length")
    assert answer["content"][0]["text"]
    assert answer["usage"]["input"] + answer["usage"]["cacheRead"] > 1000


def test_the_ai_sdk_in_node(served: Served) -> None:
    said = run_program("ai_sdk.mjs", f"{served.url}/v1", MODEL_NAME, timeout_s=RUN_S)
    assert said.pop("parsed").keys() == {"name", "people"}
    assert said.pop("calls")[0][1] in ("Paris", "Rome")
    assert said == {"chat": served.chat, "stream": served.chat, "finish": "tool-calls"}


def test_autogen_calls_a_tool_and_takes_its_result(served: Served) -> None:
    said = said_by("calls_autogen.py", "autogen-ext[openai]", served)
    assert said["calls"][0][0] == "note"
    assert said["after"]


def test_instructor_reads_json_out_of_a_text(served: Served) -> None:
    assert said_by("with_instructor.py", "instructor", served)["fields"]


def test_llm_on_the_command_line(served: Served, tmp_path: Path) -> None:
    models = [{"model_id": "baton", "model_name": MODEL_NAME, "api_base": f"{served.url}/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    asked = ["-m", "baton", QUESTION, "-o", "temperature", "0", "-o", "max_tokens", "16"]
    variables = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    for options in ([], ["--no-stream"]):
        shown = run(folder_of("llm") / "llm", *asked, *options, **variables)
        assert shown.strip() == served.chat.strip()


def test_guidellm(served: Served, demo_model: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    run(
        folder_of("guidellm") / "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={served.url},model={MODEL_NAME}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=6"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={demo_model}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console-interactive",
    )
    (measured,) = json.loads(report.read_text())["benchmarks"]
    assert measured["metrics"]["request_totals"]["errored"] == 0
    answers = measured["requests"]["successful"]
    assert len(answers) >= 6
    assert {answer["output_tokens"] for answer in answers} == {8}


def test_aiperf(served: Served, demo_model: Path, tmp_path: Path) -> None:
    run(
        folder_of("aiperf") / "aiperf",
        *("profile", "--model", MODEL_NAME, "--url", served.url, "--tokenizer", demo_model),
        *("--endpoint-type", "chat", "--streaming", "--concurrency", "2", "--request-count", "6"),
        *("--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"),
        *("--extra-inputs", "ignore_eos:true", "--artifact-dir", tmp_path),
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 6
    assert not report["error_summary"]
    assert report["usage_completion_tokens"]["avg"] == 8


def test_lm_eval(served: Served, tmp_path: Path) -> None:
    """A multiple choice of its own: no network is asked."""
    data = tmp_path / "data.jsonl"
    questions = [
        {"question": TEXT, "choices": [" Paris", " a banana"]},
        {"question": "Water is made of hydrogen and", "choices": [" oxygen", " cheese"]},
    ]
    data.write_text("".join(json.dumps(one) + "\n" for one in questions))
    task = {
        "task": "baton_local",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "baton_local.yaml").write_text(json.dumps(task))
    arguments = f"model={MODEL_NAME},base_url={served.url}/v1/completions,tokenizer_backend=remote"
    run(
        folder_of("lm-eval[api]") / "lm_eval",
        *("run", "--model", "local-completions", "--tasks", "baton_local", "--batch_size", "2"),
        *("--include_path", tmp_path, "--output_path", tmp_path, "--model_args", arguments),
        HF_HUB_OFFLINE="1",
    )
    (report,) = tmp_path.rglob("results_*.json")
    assert json.loads(report.read_text())["results"]["baton_local"]["acc,none"] == 1.0
