"""Calls of tools through the dispatcher: streams, choices, stops, lost workers; what is asked of workers."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from byte_tokenizer import byte_tokenizer
from redis.asyncio import Redis
from scripted_workers import ScriptedCluster, scripted_cluster

from kvhive.proto.block_hash import unpack_tokens
from kvhive.proto.errors import InvalidRequest
from kvhive.proto.v1 import worker_pb2
from kvhive.router.chat.messages import ChatMessage, ChatPrompt, Tool, ToolCall, ToolChoice
from kvhive.router.chat.tools.by_name import FORMS
from kvhive.router.chat.tools.tool_use import ToolUse
from kvhive.router.choice_output import ChoiceOutput
from kvhive.router.frontend import Delta, Finished
from kvhive.router.output_text import OutputText
from kvhive.router.request import GenerateRequest
from kvhive.router.sampling_params import SamplingParams
from kvhive.router.tokenizer import TextTokenizer
from kvhive.router.worker_client import WorkerLost

TOOL = Tool("get_weather", "", '{"type": "object", "properties": {"city": {"type": "string"}}}')
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ARGUMENTS = '{"city": "Köln"}'
AUTO = ToolChoice()


@dataclass
class Script:
    """Workers that generate these token ids, one by one, and end; the first one is lost before `lost_at`."""

    outputs: dict[int, list[int]]
    stopped: bool = True
    lost_at: int | None = None
    requests: list[worker_pb2.WorkerGenerateRequest] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    async def generate(
        self, address: str, request: worker_pb2.WorkerGenerateRequest
    ) -> AsyncGenerator[worker_pb2.WorkerGenerateResponse, None]:
        """See WorkerClient."""
        self.requests.append(request)
        done, first = request.resumed_tokens, request.first_choice
        choices = range(first, first + max(1, request.n))
        yield worker_pb2.WorkerGenerateResponse(cached_tokens=0, written_tokens=0)
        for place in range(done, max(len(self.outputs[index]) for index in choices)):
            if place == self.lost_at and not done:
                raise WorkerLost("it is gone")
            message = worker_pb2.WorkerGenerateResponse()
            for index in choices:
                tokens = self.outputs[index]
                if place < len(tokens) and index not in self.cut:
                    update = message.updates.add(choice=index, token_ids=[tokens[place]])
                    update.logprobs.add(logprob=-float(place))
                    if place == len(tokens) - 1:
                        update.finished.stopped = self.stopped
            yield message

    async def stop_choices(self, address: str, request_id: str, choices: Sequence[int]) -> None:
        """See WorkerClient."""
        self.cut += choices


@dataclass
class Said:
    """What a client gets of one choice, in order."""

    order: list[str | list[str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: int = 0
    end: Finished | None = None

    ids: list[str] = field(default_factory=list)

    def calls(self) -> tuple[ToolCall, ...]:
        """Its calls, as a client may send them back."""
        made = [part for part in self.order if isinstance(part, list)]
        spelled = [(name, json.dumps(json.loads(arguments), indent=1)) for name, arguments in made]
        return tuple(ToolCall(id_, *call) for id_, call in zip(self.ids, spelled, strict=True))

    def take(self, event: Delta) -> None:
        if event.text:
            if self.order and isinstance(self.order[-1], str):
                self.order[-1] += event.text
            else:
                self.order.append(event.text)
        for call in event.tool_calls:
            if call.id:
                self.order.append([call.name, ""])
                self.ids.append(call.id)
            said = self.order[-1]
            assert isinstance(said, list)
            said[1] += call.arguments
        self.token_ids += event.token_ids
        self.logprobs += len(event.logprobs)


@pytest.fixture(scope="module")
def tokenizer(demo_gguf: Path) -> TextTokenizer:
    return TextTokenizer.load(demo_gguf)


@pytest.fixture
async def cluster(index_redis: Redis, tokenizer: TextTokenizer) -> AsyncIterator[ScriptedCluster]:
    with ThreadPoolExecutor(1) as executor:
        yield await scripted_cluster(index_redis, tokenizer, executor)


async def ask(
    cluster: ScriptedCluster,
    script: Script,
    choice: ToolChoice = AUTO,
    tools: Sequence[Tool] = (TOOL,),
    messages: Sequence[ChatMessage] = (ChatMessage("user", "Weather?"),),
    **sampling: object,
) -> list[Said]:
    cluster.dispatcher._workers = script
    prompt = ChatPrompt(tuple(messages), tuple(tools), choice)
    options = SamplingParams(**{"max_tokens": 500, "logprobs": 0, **sampling})  # type: ignore[arg-type]
    said = [Said() for _ in script.outputs]
    request = GenerateRequest(prompt, options, n=len(said))
    async with aclosing(cluster.dispatcher.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                said[event.choice].take(event)
            elif isinstance(event, Finished):
                said[event.choice].end = event
    return said


def ends_of(said: Sequence[Said]) -> list[str]:
    return [one.end.reason for one in said if one.end is not None]


async def test_calls_and_texts_of_several_choices(cluster: ScriptedCluster, tokenizer: TextTokenizer) -> None:
    texts = [f"I look.\n{CALL}\n{CALL}", "No call: <b>", f"{CALL} Done."]
    script = Script({index: tokenizer.encode(text, False) for index, text in enumerate(texts)})
    said = await ask(cluster, script)
    call = ["get_weather", ARGUMENTS]
    assert [one.order for one in said] == [["I look.", call, call], ["No call: <b>"], [call, "Done."]]
    assert ends_of(said) == ["tool_calls", "stop", "tool_calls"]
    for index, one in enumerate(said):  # every token counts, what is a call as well
        assert one.token_ids == script.outputs[index] and one.logprobs == len(one.token_ids)
    assert [one.end and one.end.usage is None for one in said].count(False) == 1


@pytest.mark.parametrize("lost_at", [1, 5, 12, 20])
async def test_a_call_goes_on_where_its_worker_was_lost(
    cluster: ScriptedCluster, tokenizer: TextTokenizer, lost_at: int
) -> None:
    tokens = tokenizer.encode(f"So:\n{CALL}", False)
    said = (await ask(cluster, Script({0: tokens}, lost_at=lost_at)))[0]
    assert said.order == ["So:", ["get_weather", ARGUMENTS]] and said.token_ids == tokens
    assert said.end is not None and said.end.usage is not None and said.end.usage.failovers == 1


async def test_what_max_tokens_cut_is_no_finished_call(
    cluster: ScriptedCluster, tokenizer: TextTokenizer
) -> None:
    """Nor is it lost: a head comes as text, arguments stay as far as they came."""
    for cut, order in ((CALL[:20], [CALL[:20]]), (CALL[:-20], [["get_weather", ARGUMENTS[:-4]]])):
        said = await ask(cluster, Script({0: tokenizer.encode(cut, False)}, stopped=False))
        assert ends_of(said) == ["length"]
        text = "".join(part if isinstance(part, str) else part[1] for part in said[0].order)
        assert text and (said[0].order == order or text in cut)
    whole = await ask(cluster, Script({0: tokenizer.encode(CALL, False)}, stopped=False))
    assert ends_of(whole) == ["length"] and whole[0].order == [["get_weather", ARGUMENTS]]


async def test_only_one_call_ends_the_choice_and_the_worker_hears_of_it(
    cluster: ScriptedCluster, tokenizer: TextTokenizer
) -> None:
    one = tokenizer.encode(f"So:\n{CALL}", False)
    both = one + tokenizer.encode(f"\n{CALL}", False)
    script = Script({0: both, 1: both, 2: tokenizer.encode("No " * 100, False)})
    said = await ask(cluster, script, ToolChoice(parallel=False))
    assert [part.order for part in said[:2]] == [["So:", ["get_weather", ARGUMENTS]]] * 2
    assert ends_of(said) == ["tool_calls", "tool_calls", "stop"]
    assert sorted(script.cut) == [0, 1]
    assert said[0].token_ids == both[: len(said[0].token_ids)] and len(said[0].token_ids) <= len(one) + 1


async def test_the_end_after_one_call_waits_for_min_tokens(
    cluster: ScriptedCluster, tokenizer: TextTokenizer
) -> None:
    tokens = tokenizer.encode(f"{CALL} and more text after it", False)
    said = await ask(cluster, Script({0: tokens}), ToolChoice(parallel=False), min_tokens=len(tokens) - 2)
    assert len(said[0].token_ids) == len(tokens) - 2
    assert said[0].order[0] == ["get_weather", ARGUMENTS] and len(said[0].order) == 2


async def test_a_stop_string_ends_a_choice_wherever_it_stands_and_is_named(
    cluster: ScriptedCluster, tokenizer: TextTokenizer
) -> None:
    tokens = tokenizer.encode(f"{CALL} Done. More.", False)
    said = await ask(cluster, Script({0: tokens}), stop=("e. M", "nothing"))
    assert said[0].order == [["get_weather", ARGUMENTS], "Don"] and ends_of(said) == ["tool_calls"]
    assert said[0].end is not None and said[0].end.stop == "e. M"
    said = await ask(cluster, Script({0: tokens}), stop=("weather",))
    assert said[0].order == ['<tool_call>\n{"name": "get_'] and ends_of(said) == ["stop"]
    said = await ask(cluster, Script({0: tokens}), stop=("nothing",))
    assert said[0].end is not None and said[0].end.stop == ""


async def test_without_tools_or_with_none_of_them_the_text_is_untouched(
    cluster: ScriptedCluster, tokenizer: TextTokenizer
) -> None:
    tokens = tokenizer.encode(CALL, False)
    for choice, tools in ((ToolChoice("none"), (TOOL,)), (ToolChoice(), ())):
        said = await ask(cluster, Script({0: tokens}), choice, tools)
        assert said[0].order == [CALL] and ends_of(said) == ["stop"]


async def test_a_required_call_reaches_the_worker_as_a_grammar(
    cluster: ScriptedCluster, tokenizer: TextTokenizer
) -> None:
    script = Script({0: tokenizer.encode(CALL, False)})
    said = await ask(cluster, script, ToolChoice("required", "get_weather"))
    assert said[0].order == [["get_weather", ARGUMENTS]]
    grammar = script.requests[0].sampling.grammar
    assert grammar.text.startswith("%llguidance") and "get_weather" in grammar.text
    with pytest.raises(InvalidRequest, match=r"tools\[1\]\.parameters: .*uniqueItems"):
        bad = Tool("bad", "", json.dumps({"properties": {"a": {"type": "array", "uniqueItems": True}}}))
        await ask(cluster, script, ToolChoice("required"), (TOOL, bad))
    await ask(cluster, script, ToolChoice(), (TOOL, bad))  # where nothing is enforced, it only describes


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "text", [CALL, f"I look.\n\n{CALL}\n{CALL}", f'{CALL}\n<tool_call>{{"name": "nobody"']
)
async def test_calls_that_come_back_are_the_ids_that_were_generated(
    cluster: ScriptedCluster, tokenizer: TextTokenizer, text: str, parallel: bool
) -> None:
    """As a client sends them back: with other spaces in the arguments, and what each tool has answered."""
    end = min(tokenizer.eos_token_ids)
    script = Script({0: [*tokenizer.encode(text, False), end]})
    choice = ToolChoice(parallel=parallel)
    said = (await ask(cluster, script, choice))[0]
    messages, ids = [ChatMessage("user", "Weather?")], said.calls()
    content = "".join(part for part in said.order if isinstance(part, str))
    messages.append(ChatMessage("assistant", content, ids))
    messages += [ChatMessage("tool", "It rains.", tool_call_id=call.id) for call in ids]
    await ask(cluster, script, choice, messages=messages)
    first, second = (unpack_tokens(request.token_ids) for request in script.requests)
    assert ids and second[: len(first) + len(said.token_ids)] == [*first, *said.token_ids]


@pytest.mark.parametrize("form", ["mistral_args", "deepseek_v31", "granite"])
async def test_calls_that_begin_with_special_tokens_are_seen(form: str) -> None:
    """These tokens have no text in an output, but for who looks for calls."""
    markers, shape = FORMS[form].markers, FORMS[form].shape
    tokenizer = byte_tokenizer(markers)

    async def let_through(grammar: object) -> None:
        """Refuse nothing."""

    request = GenerateRequest(ChatPrompt((ChatMessage("user", "x"),), (TOOL,)))
    _, reading = await ToolUse(FORMS[form], tokenizer, let_through).prepare(request)
    assert reading is not None and sorted(reading.shown.values()) == sorted(markers)
    call = f"{shape.opens}{shape.before}get_weather{shape.between}{ARGUMENTS}{shape.after}{shape.closes}"
    tokens = tokenizer.encode("So: " + call, False)
    assert tokenizer.decode(tokens) != tokenizer.decode(tokens, skip_special_tokens=False)
    for step in (1, len(tokens)):
        output = ChoiceOutput(OutputText(tokenizer, (), 0, reading.shown), reading.parser())
        pieces = []
        for start in range(0, len(tokens), step):
            pieces += output.push(tokens[start : start + step])[0]
        pieces += output.finish()
        assert "".join(text for text, _ in pieces) == "So:"
        deltas = [delta for _, calls in pieces for delta in calls]
        assert "".join(delta.name for delta in deltas) == "get_weather"
        assert "".join(delta.arguments for delta in deltas) == ARGUMENTS and output.calls_tools
    plain = OutputText(tokenizer, ())
    assert plain.push(tokens)[0] + plain.finish() == tokenizer.decode(tokens)
