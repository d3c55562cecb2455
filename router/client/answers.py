"""A whole answer, put together from the events of its stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvhive.client.messages import Event
from kvhive.proto.v1 import inference_pb2 as pb

_REASONS: dict[int, Literal["stop", "length", "tool_calls"]] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(slots=True)
class Choice:
    """One of the n answers to a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    logprobs: list[pb.Logprobs] = field(default_factory=list)
    reason: Literal["", "stop", "length", "tool_calls"] = ""
    """Why it ended; empty while it has not."""
    stop: str = ""
    """The stop string that ended it, if one did."""

    @property
    def message(self) -> pb.ChatMessage:
        """It as the assistant's turn, to go on with."""
        return pb.ChatMessage(role="assistant", content=self.text, tool_calls=self.tool_calls)


@dataclass(slots=True)
class Answer:
    """Everything that a generation brought."""

    request_id: str = ""
    worker_id: str = ""
    prompt_tokens: int = 0
    choices: list[Choice] = field(default_factory=list)
    prompt_logprobs: list[pb.Logprobs] = field(default_factory=list)
    usage: pb.Usage = field(default_factory=pb.Usage)

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text if self.choices else ""

    def take(self, event: Event) -> None:
        """Add what an event says."""
        match event:
            case pb.Started():
                self.request_id, self.worker_id = event.request_id, event.worker_id
                self.prompt_tokens = event.prompt_tokens
            case pb.Delta():
                self.prompt_logprobs.extend(event.prompt_logprobs)
                choice = self._choice(event.choice)
                choice.text += event.text
                choice.token_ids.extend(event.token_ids)
                choice.logprobs.extend(event.logprobs)
                for more in event.tool_calls:
                    _extend(choice.tool_calls, more)
            case pb.Finished():
                choice = self._choice(event.choice)
                choice.reason, choice.stop = _REASONS.get(event.reason, ""), event.stop
                if event.HasField("usage"):
                    self.usage.CopyFrom(event.usage)

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice())
        return self.choices[index]


def _extend(calls: list[pb.ToolCall], more: pb.ToolCallDelta) -> None:
    while len(calls) <= more.index:
        calls.append(pb.ToolCall())
    call = calls[more.index]
    call.id, call.name = call.id or more.id, call.name or more.name
    call.arguments += more.arguments
