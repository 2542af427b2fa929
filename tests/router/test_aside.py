"""What a request brings may crash, hang or fill memory: in a process aside, and of that request."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from frontdoor_kit import served_model, write_tokenizer

from baton.inference.v1 import inference_pb2 as api
from router.answers.forms import ResponseForm, Thought
from router.aside.turns import Turns
from router.errors import RouterError
from router.jobs import ServedModel
from router.requests import rendering
from router.requests.chat_template import ChatTemplateError
from router.requests.rendering import Model, Renderers
from router.requests.tokenization import Tokenizers
from router.structure import checking, grammars
from router.structure.checking import Question
from router.structure.grammars import KEPT_REFUSALS, Grammars

HONEST = api.Structure(json_schema=api.JsonSchema(schema='{"type": "integer"}', strict=True))
TOO_COMPLEX, INVALID = "STRUCTURE_TOO_COMPLEX", "INVALID_FIELD"


def name(number: int) -> str:
    return "r" + "".join(chr(ord("a") + int(digit)) for digit in str(number))


def lark_chain(rules: int) -> api.Structure:
    chain = (f"{name(i)}: {name(i + 1)}" for i in range(rules))
    return api.Structure(lark="\n".join((f"start: {name(0)}", *chain, f'{name(rules)}: "x"')))


def lark_brackets(depth: int) -> api.Structure:
    return api.Structure(lark=f'start: {"(" * depth}"x"{")" * depth}')


def gbnf_chain(rules: int, times: int) -> api.Structure:
    chain = (f"r{i} ::=" + f" r{i + 1}" * times for i in range(rules))
    return api.Structure(gbnf="\n".join(("root ::= r0", *chain, f'r{rules} ::= "x"')))


def schema(text: str) -> api.Structure:
    return api.Structure(json_schema=api.JsonSchema(schema=text))


def reference_chain(length: int) -> api.Structure:
    chain: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return schema(json.dumps({"$defs": {**chain, f"d{length}": {}}, "$ref": "#/$defs/d0"}))


def unknown_keywords(count: int) -> api.Structure:
    keys = (f'"z{i:x}": 1' for i in range(count))
    return schema("{" + ", ".join((*keys, '"type": "z"')) + "}")


ATTACKS = {
    "rules in a chain": lark_chain(12_000),
    "brackets in a grammar": lark_brackets(100_000),
    "references in a chain": reference_chain(6_000),
    "a chain that doubles": gbnf_chain(4_000, 2),
    "unknown keywords": unknown_keywords(15_000),
    "a deep schema": schema('{"items":' * 127 + "{}" + "}" * 127),
    "a deep text": schema("[" * 100_000),
    "brackets in a regex": api.Structure(regex="(" * 100_000 + ")" * 100_000),
    "repeats of repeats": api.Structure(regex="(((((a{99}){99}){99}){99}){99}|b){99}"),
}


def question(structure: api.Structure) -> Question:
    generation = api.GenerationInput(structure=structure)
    return Question(generation.SerializeToString(), ResponseForm(), Thought(), {})


class Checker:
    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder)
        self.grammars = Grammars()
        self.model: ServedModel = served_model(folder)

    async def reason(self, structure: api.Structure, caller: str = "a") -> str:
        try:
            await self.grammars.grammar(question(structure), self.model, caller)
        except RouterError as error:
            return error.reason
        return ""

    @property
    def pid(self) -> int:
        (server,) = self.grammars._servers.values()
        assert server._process is not None
        return server._process.pid

    def forked(self) -> set[int]:
        return set(map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()))

    def cpu_s(self) -> float:
        """Of the processes that it has forked."""
        ticks = sum(map(int, self._times(self.pid)[13:15]))
        ticks += sum(sum(map(int, self._times(pid)[11:13])) for pid in self.forked())
        return ticks / os.sysconf("SC_CLK_TCK")

    def _times(self, pid: int) -> list[str]:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


@pytest.fixture
async def checker(tmp_path: Path) -> AsyncIterator[Checker]:
    checker = Checker(tmp_path)
    await checker.grammars.warm(checker.model)
    yield checker
    checker.grammars.close()


async def ended(checker: Checker) -> None:
    async with asyncio.timeout(30):
        while checker.forked():
            await asyncio.sleep(0.01)


async def test_no_grammar_ends_or_holds_up_the_router(
    checker: Checker, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = checking.BOUNDS._replace(cpu_s=0.5)
    monkeypatch.setattr(grammars, "BOUNDS", bounds)
    pid = checker.pid
    for what, attack in ATTACKS.items():
        before_s = checker.cpu_s()
        assert await checker.reason(attack) in (TOO_COMPLEX, INVALID, ""), what
        await asyncio.sleep(0.1)  # It is reaped.
        assert checker.cpu_s() - before_s < bounds.cpu_s + 0.5, what
        assert await checker.reason(HONEST) == ""
    assert checker.pid == pid, "nothing of it has ended the server"


async def test_a_crash_is_remembered(checker: Checker) -> None:
    chain = lark_chain(12_000)
    assert await checker.reason(chain) == TOO_COMPLEX
    os.kill(checker.pid, signal.SIGSTOP)
    assert await checker.reason(chain) == TOO_COMPLEX, "nobody is asked again"
    assert len(checker.grammars._refused._entries) == 1 < KEPT_REFUSALS


async def test_a_server_that_was_lost_is_started_again(checker: Checker) -> None:
    os.kill(checker.pid, signal.SIGKILL)
    assert await checker.reason(HONEST) == ""
    os.kill(checker.pid, signal.SIGKILL)
    assert await checker.reason(schema('{"type": "null"}')) == "", "the process that waited, too"


async def test_a_server_that_is_lost_while_it_starts_is_started_once_more(checker: Checker) -> None:
    lost = checker.pid
    os.kill(lost, signal.SIGKILL)
    asked = asyncio.create_task(checker.reason(schema('{"type": "boolean"}')))
    (server,) = checker.grammars._servers.values()
    async with asyncio.timeout(30):
        while server._process is None or server._process.pid == lost:
            await asyncio.sleep(0)
    os.kill(checker.pid, signal.SIGKILL)
    assert await asked == ""


async def test_a_process_checks_one_form_after_the_other(checker: Checker) -> None:
    for number in range(3):
        assert await checker.reason(schema(json.dumps({"const": number}))) == ""
        assert len(checker.forked()) == 1
    assert await checker.reason(lark_chain(12_000)) == TOO_COMPLEX
    await ended(checker)
    assert await checker.reason(HONEST) == ""


async def test_work_ends_when_all_who_wait_have_left(checker: Checker) -> None:
    slow = gbnf_chain(4_000, 2)
    first, second = (asyncio.create_task(checker.reason(slow)) for _ in range(2))
    async with asyncio.timeout(30):
        while not checker.forked():
            await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.sleep(0.01)
    assert checker.forked(), "the second still waits"
    second.cancel()
    await ended(checker)
    await asyncio.wait([first, second])
    assert checker.cpu_s() < checking.BOUNDS.cpu_s


async def test_callers_take_turns() -> None:
    turns, order = Turns(1), []

    async def work(caller: str) -> None:
        async with turns.turn(caller):
            order.append(caller)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(work(caller)) for caller in "aaaaabbc"]
    await asyncio.sleep(0)
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert "".join(order) == "abcabaa"


TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x",
    "fills": "{% set x = namespace(y='x') %}{% for a in range(40) %}"
    "{% set x.y = x.y ~ x.y %}{% endfor %}{{ x.y }}",
    "computes when compiled": "{{ 'x' * 10 ** 11 }}",
}


@pytest.mark.parametrize("what", TEMPLATES)
async def test_a_template_that_never_ends_is_ended(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "BOUNDS", rendering.BOUNDS._replace(cpu_s=0.3))
    renderers, chat = Renderers(), api.ChatPrompt(messages=[api.ChatMessage(content="Hi", role=1)])
    for _ in range(2):
        with pytest.raises(ChatTemplateError, match="too long or too much memory"):
            await renderers.render(Model((("default", TEMPLATES[what]),), ()), chat, "")
        good = Model((("default", "{{ eos }}{{ messages[0].content }}"),), (("eos", "!"),))
        assert await renderers.render(good, chat, "") == "!Hi"
    renderers.close()


async def test_a_process_that_renders_goes_on_with_the_next_conversation() -> None:
    renderers, model = Renderers(), Model((("default", "{{ messages[0].content }}"),), ())
    for number in range(5):
        chat = api.ChatPrompt(messages=[api.ChatMessage(content=str(number), role=1)])
        assert await renderers.render(model, chat, "") == str(number)
    (process,) = renderers._idle[model]
    assert process.answers == 6, "the model, and five conversations"
    assert renderers._server._process is not None
    os.kill(renderers._server._process.pid, signal.SIGKILL)
    await asyncio.sleep(0.1)
    assert await renderers.render(model, chat, "") == "4", "another one takes its place"
    renderers.close()


async def test_a_tokenizer_that_crashes_its_reader_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer.json").read_text())
    found = Tokenizers()
    monkeypatch.setattr(rendering, "READ", rendering.READ._replace(memory_bytes=16 << 20))
    config["model"]["vocab"] |= {f"<{number}>" * 9: 10_000 + number for number in range(100_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(RouterError, match="TOKENIZER_UNSUPPORTED"):
        await found.get(str(tmp_path))
    found.close()
