"""Other people's schemas: each is refused in words that say why, or what is written to its end is valid.

By hand, over a folder of JSON files: KVHIVE_SCHEMAS=FOLDER. A file is a schema, or a list of groups that have
one each, as in the JSON-Schema-Test-Suite.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_rig import spoken, two_choices
from real_engine import RealEngine, tiny_model

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.json_schema import FIELD
from kvhive.worker.sequence import FinishReason, Sequence

FOLDER = os.environ.get("KVHIVE_SCHEMAS", "")
GROUP = 16
MAX_TOKENS = 200

pytestmark = pytest.mark.skipif(
    not Path(FOLDER).is_dir() or not FOLDER, reason="by hand: KVHIVE_SCHEMAS=FOLDER"
)


def schemas(folder: Path) -> Iterator[tuple[str, Any]]:
    for path in sorted(folder.rglob("*.json")):
        held = json.loads(path.read_text())
        for index, group in enumerate(held if isinstance(held, list) else [{"schema": held}]):
            yield f"{path.relative_to(folder)}[{index}]", group["schema"]


def as_ecma(schema: Any) -> Any:
    """Return it for a judge to whom letters and digits are more than ASCII has, which they are not there."""
    if isinstance(schema, list):
        return list(map(as_ecma, schema))
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"(?a){held}" if key == "pattern" and re.search(r"\\[wd]", str(held), re.I) else as_ecma(held)
        for key, held in schema.items()
    }


def verdict(schema: Any, text: str) -> str:
    """Return what the judge says, who knows no pattern that Python's `re` does not."""
    kind = jsonschema.Draft202012Validator
    try:
        right = kind(as_ecma(schema), format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text))
    except re.error:
        return "not judged"
    return "valid" if right else "invalid"


@pytest.mark.timeout(7200)
def test_each_is_refused_by_name_or_its_answers_are_valid(tmp_path: Path) -> None:
    target, draft_model = tiny_model(tmp_path / "target", 1, 1), tiny_model(tmp_path / "draft", 1, 2)
    taken: dict[str, Any] = {}
    requests: list[Sequence] = []
    reasons: Counter[str] = Counter()
    for name, schema in schemas(Path(FOLDER)):
        try:
            requests += two_choices(name, schema, MAX_TOKENS)
            taken[name] = schema
        except InvalidRequest as error:
            assert error.field == FIELD and error.problem, name
            reasons[re.sub(r"(?<!keys)[:;].*|\d+", "", error.problem)[:70]] += 1
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for start in range(0, len(requests), 2 * GROUP):
        group = requests[start : start + 2 * GROUP]
        engine = RealEngine(target, 500, 128)
        answers = engine.run(*group)
        for seq, tokens in zip(group, answers, strict=True):
            schema = taken[seq.request_id.rpartition("/")[0]]
            reason = engine.sequences[seq.request_id].finish_reason
            ended = verdict(schema, spoken(tokens)) if reason is FinishReason.STOP else f"cut: {reason}"
            counts[ended] += 1
            if ended == "invalid":
                wrong.append(f"{seq.request_id}: {json.dumps(schema)} wrote {spoken(tokens)}")
        for draft in ("ngram", "draft"):
            again = RealEngine(target, 500, 128, draft, draft_model).run(*group)
            wrong += [
                f"{s.request_id}: other tokens with {draft}"
                for s, a, b in zip(group, answers, again, strict=True)
                if a != b
            ]
    print(f"\n{len(taken)} schemas taken, {sum(reasons.values())} refused; answers: {dict(counts)}")
    for reason, count in reasons.most_common():
        print(f"{count:5}  {reason}")
    assert len(taken) > 0 and not wrong, "\n".join(wrong)
