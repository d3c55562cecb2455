"""How many of each there are in a message of kvhive.v1, checked before anything is made of them.

Megabytes of empty messages, pins or stops parse in milliseconds; each made an object of ours would hold up
the event loop for seconds. The limits, and the words, are those of the checks that come later.
"""

from __future__ import annotations

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.v1 import inference_pb2 as pb
from kvhive.router.chat.messages import check_call_counts, check_message_count, check_tool_count
from kvhive.router.request import check_pin_count, check_prompt_length
from kvhive.router.sampling_params import check_bias_count, check_stop_counts


def check_counts(wire: pb.GenerateRequest | pb.TokenizeRequest | pb.PrewarmRequest, max_context: int) -> None:
    """Check what repeats in a request; O(messages), of which there are few then. Raises InvalidRequest."""
    match wire.WhichOneof("input"):
        case "token_ids":
            assert not isinstance(wire, pb.TokenizeRequest)
            if wire.token_ids.ids:
                check_prompt_length("token_ids", len(wire.token_ids.ids), max_context)
        case "chat":
            check_message_count(len(wire.chat.messages))
            check_tool_count(len(wire.chat.tools))
            check_call_counts(len(message.tool_calls) for message in wire.chat.messages)
    if isinstance(wire, pb.GenerateRequest):
        check_pin_count(len(wire.pins))
        check_bias_count(len(wire.sampling.logit_bias))
        check_stop_counts(len(wire.sampling.stop), len(wire.sampling.stop_token_ids))


def check_detokenized_count(wire: pb.DetokenizeRequest, max_context: int) -> None:
    """Check how many ids are to become text. Raises InvalidRequest."""
    count = len(wire.token_ids)
    if count > max_context:
        raise InvalidRequest("token_ids", f"must be at most {max_context}, is {count}")
