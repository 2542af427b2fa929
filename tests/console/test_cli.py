"""Help, errors and exit codes of the command line."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from typer.testing import CliRunner, Result

from baton.addresses import CannotListenError, check_free
from baton.errors import BatonError, InvalidRequestError, OverloadedError
from console import up
from console.cli import app, explain
from console.ports import ANY_PORT, PortPicker, PortTakenError
from local import vllm_flags
from serving.settings import DEBUG, fields
from worker.settings import Role, WorkerSettings

NOBODY = "127.0.0.1:1"


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", **environment})


def plain(text: str) -> str:
    """Without colours and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


@pytest.fixture(autouse=True)
def no_settings_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_help_names_every_command() -> None:
    shown = plain(run("--help").output)
    for command in (
        "demo",
        "up",
        "router",
        "worker",
        "prefill",
        "decode",
        "generate",
        "models",
        "bench",
    ):
        assert f" {command} " in shown
    assert "Exit codes" in shown


@pytest.mark.parametrize(
    "command",
    [
        "demo",
        "up",
        "router",
        "worker",
        "prefill",
        "decode",
        "generate",
        "models",
        "config",
        "trace",
        "bench",
        "top",
    ],
)
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_every_setting_of_a_worker_is_an_option() -> None:
    shown = plain(run("worker", "--help").output)
    for name, field in WorkerSettings.model_fields.items():
        if name == DEBUG:
            continue
        assert f"--{name.replace('_', '-')}" in shown
        assert plain(str(field.description))[:20] in shown


def test_short_forms_fix_the_role() -> None:
    assert "--role <" in plain(run("worker", "--help").output)
    assert "--role <" not in plain(run("prefill", "--help").output)


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_of_settings_fits_the_terminal_and_cuts_nothing_off(columns: str) -> None:
    result = CliRunner().invoke(app, ["worker", "--help"], env={"COLUMNS": columns})
    assert max(map(len, result.output.splitlines())) <= min(int(columns), 100)
    for name in WorkerSettings.model_fields.keys() - {DEBUG}:
        assert f"--{name.replace('_', '-')} " in result.output
    assert "--insecure / --no-insecure" in result.output
    assert "--prefix-cache" not in result.output  # an old name, taken for one more release
    assert "[worker]" in result.output
    assert "…" not in result.output


def test_config_says_where_values_come_from() -> None:
    shown = run("config", "worker", BATON_MAX_SEQUENCES="8").output
    assert "max_sequences = 8  # BATON_MAX_SEQUENCES" in shown
    assert "[router]" not in shown


def test_a_variable_that_is_no_setting_is_told() -> None:
    result = run("config", "worker", BATON_MAX_SEQUENCE="8", BATON_XYZZY="1", BATON_TOKEN="t")
    told = plain(result.output)
    assert (
        "BATON_MAX_SEQUENCE is no setting, and ignored (did you mean `BATON_MAX_SEQUENCES`?)"
        in told
    )
    assert "warning BATON_XYZZY is no setting, and ignored" in told
    assert told.count("did you mean") == 1, "nothing is like XYZZY"
    assert "BATON_TOKEN" not in told
    assert result.exit_code == 0


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_up_knows_what_a_port_is(port: str) -> None:
    assert run("up", "--port", port).exit_code == 2


def test_wrong_settings_are_one_line_and_wrong_use() -> None:
    result = run("config", "worker", BATON_DEVICE="tpu")
    assert result.exit_code == 2
    assert "`device`" in plain(result.output)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", [("generate", "Hello"), ("models",)])
def test_no_router_says_what_to_do(command: tuple[str, ...]) -> None:
    result = run(*command, "--router", NOBODY)
    assert result.exit_code == 3
    assert "baton up" in plain(result.output)
    assert "Traceback" not in result.output


def test_models_of_nobody_as_json_fails_too() -> None:
    assert run("models", "--json", "--router", NOBODY).exit_code == 3


def test_errors_become_a_line_and_a_code() -> None:
    busy = OverloadedError("the queue is full", reason="QUEUE_FULL", retry_after_s=1.25)
    assert explain(busy) == ("QUEUE_FULL: the queue is full (again in 1.2 s)", 3)
    assert explain(InvalidRequestError("bad")) == ("bad", 2)
    elsewhere = BatonError("Method not found!", code=grpc.StatusCode.UNIMPLEMENTED)
    assert "no router's port for clients" in explain(elsewhere)[0]
    assert explain(ZeroDivisionError()) is None
    closed = PermissionError(errno.EACCES, "Permission denied", "/closed")
    assert explain(closed) == ("/closed: Permission denied", 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    assert explain(full) == ("the output cannot be written: No space left on device", 1)
    assert explain(BrokenPipeError(errno.EPIPE, "Broken pipe")) is None, "click knows it"
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    assert explain(caught.value) == ("what came in is no text in UTF-8", 2)


@pytest.mark.parametrize(
    ("process", "option"),
    [
        *(
            ("router", name)
            for name in ("--listen", "--internal-listen", "--http-listen", "--admin")
        ),
        *(("worker", name) for name in ("--listen", "--admin")),
    ],
)
def test_a_taken_port_is_one_line_and_found_at_once(process: str, option: str) -> None:
    """Before a model that is not there is looked for, too."""
    free = {"--listen": "127.0.0.1:0", "--admin": "127.0.0.1:0"}
    if process == "router":
        free |= {"--internal-listen": "127.0.0.1:0", "--http-listen": "127.0.0.1:0"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = [word for flag in (free | {option: address}).items() for word in flag]
        result = run(process, *flags, BATON_MODEL="/not/there")
    assert result.exit_code == 1
    said = f"error cannot listen on {address} ({option}): address already in use"
    assert plain(result.output) == said


@pytest.mark.parametrize(
    ("theirs", "ours"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_a_port_is_shared_only_where_both_say_so(theirs: bool, ours: bool) -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=theirs) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with nullcontext() if theirs and ours else pytest.raises(CannotListenError, match="in use"):
            check_free(reuse_port=ours, listen=address)


@pytest.mark.parametrize("address", ["203.0.113.1:0", "no.such.host.invalid:0"])
def test_an_address_of_another_machine_cannot_be_listened_at(address: str) -> None:
    with pytest.raises(CannotListenError, match=re.escape(f"cannot listen on {address}")):
        check_free(listen="127.0.0.1:0", admin=address)


def test_a_port_that_is_taken_behind_others_that_were_free_is_one_line_too() -> None:
    """What was bound before it is let go of: at the end of the process nothing is left to say."""
    free = ("--listen", "--internal-listen", "--admin")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = ["--http-listen", f"127.0.0.1:{taken.getsockname()[1]}"]
        at += [word for flag in free for word in (flag, "127.0.0.1:0")]
        command = [sys.executable, "-m", "baton", "router", *at]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("close", "words"),
    [
        (">&-", "mend_streams(); sys.stdout.write('x')"),
        ("2>&-", "mend_streams(); sys.stderr.write('x')"),
        ("", "mend_streams(); stdout.print('\u00fc')"),
    ],
)
def test_output_that_is_closed_or_narrow_is_no_fault(close: str, words: str) -> None:
    words = f"import sys; from serving.output import mend_streams, stdout; {words}"
    command = f'"{sys.executable}" -c "{words}" {close}'
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    here = Path(__file__).parents[2]
    done = subprocess.run(command, shell=True, env=env, cwd=here, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (b"" if close else rb"\xfc" + b"\n")


@pytest.mark.parametrize("arguments", ["--help", "model path"])
def test_output_that_cannot_be_written_is_a_failure_without_a_traceback(arguments: str) -> None:
    """A full disk is told of; whoever closes a pipe wants no more, and is told nothing."""
    command = [sys.executable, "-m", "baton", *arguments.split()]
    # With its buffer, as a shell starts it: what is in there is written at exit, too.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(writer, "w") as closed:
        on_full, on_closed = (
            subprocess.run(
                command, stdout=file, stderr=subprocess.PIPE, text=True, env=env, timeout=60,
                check=False,
            )
            for file in (full, closed)
        )  # fmt: skip
    told = "error the output cannot be written: No space left on device"
    assert (on_full.returncode, plain(on_full.stderr)) == (1, told)
    assert (on_closed.returncode, on_closed.stderr) == (1, "")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("model", "fetch", BATON_CACHE=str(tmp_path / "file"))
    assert result.exit_code == 1
    assert f"cannot write to {tmp_path / 'file'} (Not a directory)" in plain(result.output)


def test_a_system_message_has_no_place_in_raw_text() -> None:
    assert run("generate", "x", "--raw", "--system", "y", "--router", NOBODY).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("Hi", "--max-tokens", "5000000000"), "max_tokens"),
        (("Hi", "--seed", str(1 << 64)), "seed"),
        (("Hi\udcff",), "utf-8"),
    ],
)
def test_what_a_request_cannot_say_is_wrong_use(arguments: tuple[str, ...], complaint: str) -> None:
    result = run("generate", *arguments, "--router", NOBODY)
    assert result.exit_code == 2
    assert complaint in plain(result.output)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("generate", "Hi", "--router", "localhost"), "HOST:PORT"),
        (("models", "--router", "127.0.0.1:99999"), "HOST:PORT"),
        (("health", "localhost"), "HOST:PORT"),
        (("generate", "Hi", "--token", "\u00fc"), "ASCII"),
        (("generate", "Hi", "--timeout-s", "nan"), "--timeout-s"),
        (("up", "--drain-s", "nan"), "--drain-s"),
        (("up", "--kv-memory-gib", "-1"), "--kv-memory-gib"),
        (("bench", "--output-tokens", "99999999999"), "--output-tokens"),
        (("bench", "--timeout-s", "inf"), "--timeout-s"),
        (("bench", "--url", NOBODY, "--api-key", "\u00fc"), "ASCII"),
        (("bench", "--rate", "inf"), "must be finite"),
        (("bench", "--slo-ttft-ms", "-1"), "--slo-ttft-ms"),
        (("bench", "--conversations", "2", "--num", "5"), "goes without"),
        (("bench", "--admin", "localhost"), "HOST:PORT"),
        (("plan", "--parameters", "8", "--kv-bytes", "9", "--rate", "inf"), "must be finite"),
        (("top", "--once", "--admin", "localhost"), "HOST:PORT"),
        (("trace", "--admin", "a:1,"), "HOST:PORT"),
        (("trace", "--admin", "nowhere:port"), "HOST:PORT"),
        (("fence", "p", "--epoch", "zz"), "16 hexadecimal digits"),
        (("fence", "--epoch", "4be1c0d5a9f20317"), "WORKER"),
        (("certs", "c", "--days", "99999999"), "--days"),
        (("certs", "c", "--host", "a b"), "no name of a host"),
        (("certs", "c", "--host", "\u00fc.example"), "no name of a host"),
        (("certs", "c", "--pool", "a b"), "cannot be a pool's name"),
        (("batch", "x", "y", "--url", "localhost:8000"), "http://HOST:PORT"),
        (("batch", "x", "y", "--url", "http://h:port"), "http://HOST:PORT"),
        (("up", "--prefill", "0", "--decode", "0", "--model", "."), "no worker to run"),
        (("up", "--pp", "65", "--model", "."), "less than or equal to 64"),
        (("up", "--share-experts", "--model", "."), "needs two or more workers"),
        (("demo", "--device", "gpu"), "Invalid value for '--device': 'gpu' is not one of"),
    ],
)
def test_values_that_no_one_can_mean_are_wrong_use(
    arguments: tuple[str, ...], complaint: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert complaint in plain(result.output)


def test_where_the_demo_model_is(tmp_path: Path) -> None:
    result = run("model", "path", BATON_CACHE=str(tmp_path))
    assert result.output.strip() == str(tmp_path / "models" / "SmolLM2-135M-Instruct")


def test_a_plan_gives_each_process_its_own_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = up.UpOptions(model="/m", prefill=2, decode=1, grpc_port=0, http_port=0, admin_port=0)
    plan = up.plan(options)
    assert [spec.name for spec in plan.specs] == ["router", "prefill-0", "prefill-1", "decode-0"]
    ports = re.findall(r"127\.0\.0\.1:(\d+)", json.dumps([list(s.argv) for s in plan.specs[1:]]))
    own = [port for port in ports if ports.count(port) == 1]
    assert len(own) == 6
    assert all(int(port) in ANY_PORT for port in ports), "the kernel may give it to others"
    assert "--reuse-port" not in plan.specs[0].argv
    assert plan.specs[0].stop_rank < plan.specs[1].stop_rank


def test_two_plans_share_no_port_though_nobody_listens_yet() -> None:
    first, second = (up.plan(up.UpOptions(model="/m", device="cpu")) for _ in range(2))
    addresses = [
        {plan.router_address, plan.http_address, plan.admin_address}
        | {address for _, address in plan.worker_addresses + plan.worker_admin_addresses}
        for plan in (first, second)
    ]
    assert not addresses[0] & addresses[1]
    with pytest.raises(PortTakenError, match="taken"):
        up.plan(up.UpOptions(model="/m", admin_port=int(first.admin_address.rpartition(":")[2])))


def test_a_plan_gives_each_worker_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    plan = up.plan(up.UpOptions(model="/m", grpc_port=0, http_port=0, admin_port=0))
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in plan.specs[1:]] == ["4", "5"]


@pytest.mark.parametrize(
    ("counts", "complaint"),
    [
        ({"prefill": 0, "decode": 0}, "no worker"),
        ({"device": "cuda"}, "no GPU"),
        ({"grpc_port": 1}, "taken"),
        ({"share_experts": True}, "--share-experts needs two or more workers of a role"),
        ({"share_experts": True, "both": 2, "tp": 2}, "needs --tp 1 and --pp 1"),
        (
            {"share_experts": True, "decode": 2, "pp_of": {Role.PREFILL: 2}},
            "needs --tp 1 and --pp 1",
        ),
    ],
)
def test_plans_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, object], complaint: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(PortPicker, "pick", refuse_port_1)
    with pytest.raises((up.UpError, PortTakenError), match=complaint):
        up.plan(up.UpOptions(model="/m", **counts))


def refuse_port_1(self: object, wanted: int | None, usual: int, host: str) -> str:
    if wanted == 1:
        raise PortTakenError("port 1 is taken")
    return "127.0.0.1:1234"


LISTENS = {"BATON_LISTEN": "127.0.0.2:5", "BATON_HTTP_LISTEN": "127.0.0.3:6"}


@pytest.mark.parametrize(
    ("arguments", "variables", "wanted"),
    [
        ((), {}, ("127.0.0.1", None, "127.0.0.1", None, "")),
        ((), LISTENS, ("127.0.0.2", 5, "127.0.0.3", 6, "")),
        (("--host", "::1", "--port", "7"), LISTENS, ("::1", 7, "::1", 6, "")),
        ((), {"BATON_API_KEY": "sk-1"}, ("127.0.0.1", None, "127.0.0.1", None, "sk-1")),
        (
            ("--host", "0.0.0.0", "--api-key", "sk-2"),
            {"BATON_API_KEY": "sk-1"},
            ("0.0.0.0", None, "0.0.0.0", None, "sk-2"),
        ),
    ],
)
def test_where_up_serves_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments, variables, wanted
) -> None:
    """BATON_LISTEN was not read, without a word."""
    asked = []

    def plan(options: up.UpOptions) -> NoReturn:
        asked.append(options)
        raise up.UpError("enough")

    monkeypatch.setattr(up, "plan", plan)
    assert run("up", "--model", str(tmp_path), *arguments, **variables).exit_code == 1
    (options,) = asked
    assert wanted == (
        options.host, options.grpc_port, options.http_host, options.http_port, options.api_key
    )  # fmt: skip


def test_up_says_how_certificates_are_made() -> None:
    result = run("up", "--certs", "nothere")
    assert result.exit_code == 2
    assert "`baton certs nothere` makes it" in plain(result.output)


def test_a_missing_trace_is_named_once() -> None:
    result = run("bench", "--trace", "nothere.jsonl")
    assert result.exit_code == 2
    assert plain(result.output).endswith(
        "cannot read the trace nothere.jsonl: No such file or directory"
    )


def test_up_refuses_to_serve_everybody() -> None:
    result = run("up", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "BATON_API_KEY or --api-key" in plain(result.output)


def test_a_worker_that_nobody_would_find_is_refused() -> None:
    result = run("worker", BATON_ROUTERS="")
    assert result.exit_code == 2
    assert "`routers` must name a router" in plain(result.output)


@pytest.mark.parametrize("name", ["api_key", "operator_token"])
def test_a_key_is_not_printed(name: str) -> None:
    result = run("config", "router", **{f"BATON_{name.upper()}": "sk-secret"})
    assert result.exit_code == 0
    assert "sk-secret" not in result.output
    result = run("config", "router", **{f"BATON_{name.upper()}": "sk secret"})
    assert result.exit_code == 2
    assert name in result.output
    assert "secret" not in result.output


@pytest.mark.parametrize("command", ["up", "worker"])
@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (("--max-model-len", "10"), "--max-context-tokens of baton worker"),
        (("--max-model-len=10",), "(BATON_MAX_CONTEXT_TOKENS sets it under baton up)"),
        (("--tensor-parallel-size", "2"), "--tp of baton worker"),
        (("-tp", "2"), "--tp of baton worker"),
        (("--nnodes", "2"), "--nodes of baton worker, the same command on each host"),
        (("-dp", "2"), "with --share-experts they hold a model's experts together"),
        (("--enable-expert-parallel",), "--expert-parallel of baton worker, beside --tp"),
        (("--enable-lora",), "of baton worker turns them on (docs/adapters.md)"),
    ],
)
def test_a_flag_of_vllm_is_answered_with_ours(
    command: str, flags: tuple[str, ...], answer: str
) -> None:
    result = run(command, *flags)
    assert result.exit_code == 2
    assert answer in plain(result.output)


def test_what_stands_for_vllms_flags_is_there() -> None:
    """The page in docs checks the flags; these are the variables."""
    known = {f"BATON_{name.replace('.', '_').upper()}" for name in fields(WorkerSettings)}
    for flag in vllm_flags.FLAGS:
        named = re.findall(r"BATON_\w+", vllm_flags.answer(flag) or "")
        assert set(named) <= known
    assert vllm_flags.answer("--nonsense") is None
