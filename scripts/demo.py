"""The demo of `scripts/quickstart`: five questions under one long system prompt.

The first request computes the prompt; the others are sent to the worker that holds it and skip it. A fresh
cache salt for each run makes the first one cold however often the demo runs. The exit status is 0 when
every later request found the shared prefix.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Sequence

import click

from kvhive.proto.errors import KvhiveError
from kvhive.scripts.cluster_state import ClusterState, choose_cluster, state_root
from kvhive.scripts.completion import Answer, SamplingFlags, ask, chat_request

SYSTEM_PROMPT = """\
You are the assistant of a small public library in a harbour town. Answer in one or two short, friendly
sentences, in plain words, and never invent a rule that is not listed here.

Opening hours. The library is open from nine in the morning until six in the evening on Tuesday, Wednesday
and Friday, until eight on Thursday, and from ten until four on Saturday. It is closed on Sunday, on Monday
and on public holidays. The reading room by the lighthouse opens one hour later and closes at the same time.

Borrowing. A card is free for everybody who lives in the town and for all children. A reader may borrow up
to twelve items at once: books for four weeks, films and games for one week, and the large maps for a single
day. A loan can be extended twice, unless another reader has asked for the item. Late items cost ten cents a
day, and never more than five euros. Children do not pay for being late. A lost book is replaced by the same
book, new or used, or by its price.

Rooms. There are three study rooms for up to six people and a workshop with two printers, a scanner and a
sewing machine. Rooms are booked at the desk, by telephone or on the website, at most two weeks ahead and for
at most three hours a day. Printing costs five cents a page in black and twenty cents a page in colour.

Events. Every Wednesday at four there is a story hour for children from four to eight years of age. On the
first Thursday of each month, at six, a writer reads from a new book, and entrance is free. The chess club
meets on Friday afternoons in the largest study room and welcomes beginners.
"""
QUESTIONS = (
    "Until when are you open on Thursday?",
    "How many books may I borrow, and for how long?",
    "My son is late with his book. What will it cost?",
    "Can I book a study room for tomorrow?",
    "When is the story hour?",
)
_MAX_TOKENS = 40
_HIT_SHARE = 0.75
"""The system prompt is well above this share of every prompt of the demo."""


@click.command()
@click.option("--cluster", "name")
@click.option("--hints/--no-hints", default=True, help="Say how to go on with the cluster.")
def main(name: str | None, hints: bool) -> None:
    """Run the demo on a running cluster."""
    try:
        state = choose_cluster(state_root(os.environ), name).require()
        answers = _ask_all(state)
    except KvhiveError as error:
        sys.exit(f"demo: {error}")
    hits = sum(is_hit(answer) for answer in answers[1:])
    click.echo(summary(answers, hits))
    if hints:
        click.echo(how_to_go_on(state))
    sys.exit(0 if hits == len(answers) - 1 else 1)


def is_hit(answer: Answer) -> bool:
    """Whether a request found the shared prefix in its worker's cache."""
    usage = answer.usage
    return bool(usage["cached_tokens"] >= _HIT_SHARE * usage["prompt_tokens"])


def summary(answers: Sequence[Answer], hits: int) -> str:
    """Return the last line: what the cache was worth."""
    cold, warm = answers[0].ttft_s, sum(answer.ttft_s for answer in answers[1:]) / (len(answers) - 1)
    cached = sum(answer.usage["cached_tokens"] for answer in answers)
    prompt = sum(answer.usage["prompt_tokens"] for answer in answers)
    workers = {answer.usage["worker_id"] for answer in answers}
    return (
        f"{hits} of {len(answers) - 1} later requests hit the shared prefix on {', '.join(sorted(workers))}: "
        f"{cached} of {prompt} prompt tokens came from the cache; "
        f"time to first token {cold * 1000:.0f} ms cold, {warm * 1000:.0f} ms warm"
    )


def how_to_go_on(state: ClusterState) -> str:
    """Return what one can do with the cluster now."""
    folder = os.path.dirname(sys.executable)
    kvhive = f"{folder}/kvhive"
    return f"""
The cluster is up. Talk to it:
  {kvhive} chat                       a conversation in the terminal
  {kvhive} status                     the workers and their caches
  curl {state.http}/v1/chat/completions -H 'content-type: application/json' \\
       -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'
  python -c 'from openai import OpenAI; c = OpenAI(base_url="{state.http}/v1", api_key="-"); \\
       print(c.models.list().data[0].id)'
  grpcurl -plaintext {state.grpc} kvhive.v1.Inference/GetCluster
and stop it:
  {kvhive} down"""


def _ask_all(state: ClusterState) -> list[Answer]:
    flags = SamplingFlags(max_tokens=_MAX_TOKENS, cache_salt=f"demo-{secrets.token_hex(8)}")
    answers = []
    for number, question in enumerate(QUESTIONS, 1):
        click.echo(f"\n[{number}/{len(QUESTIONS)}] {question}")
        turns = [("system", SYSTEM_PROMPT), ("user", question)]
        answer = ask(state, chat_request(turns, flags), _write)
        click.echo(f"\n{answer.summary()}")
        answers.append(answer)
    click.echo()
    return answers


def _write(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
