"""kvhive bench routing: both sides' work is what it says, and the document has what is read from it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvhive.proto.errors import ClusterError
from kvhive.scripts import bench_routing
from kvhive.scripts.bench_routing_ours import OurRouter, apply_events_s
from kvhive.scripts.bench_routing_work import IndexWork, key_number, new_number
from kvhive.scripts.cli import cli

WORK = IndexWork(blocks=5000, workers=4, prompt_blocks=64)

PEER = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    command = json.loads(line)
    print("a line of somebody's log", flush=True)
    print(json.dumps({"build": {"wrong": 0}, "events": {"blocks": 10, "s": 1.0}}.get(
        command["do"], {"us": [1e9, 1e9, 1e9]})), flush=True)
"""


def test_an_index_has_as_many_blocks_as_it_says_and_each_a_name_of_its_own() -> None:
    holdings = list(WORK.holdings())
    assert sum(length for _, _, length in holdings) == WORK.blocks
    assert max(Counter((chain, worker) for chain, worker, _ in holdings).values()) == 1
    names = {key_number(c, i) for c in range(200) for i in range(200)}
    names |= {new_number(p, i) for p in range(200) for i in range(200)}
    assert len(names) == 2 * 200 * 200 and max(names) < 2**63


def test_our_side_knows_what_the_work_expects() -> None:
    router = OurRouter(WORK)
    router.check()
    assert router.mirror.total_blocks() == WORK.blocks
    assert len(router.match_us()) == len(router.place_us()) == len(WORK.prompts())
    assert apply_events_s(WORK)[0] == WORK.blocks


def test_the_document_of_a_quick_run_beside_a_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ratio has a name that ends so, and is ours over the peer's."""
    script = tmp_path / "peer.py"
    script.write_text(PEER)

    def peer(python: Path) -> bench_routing.Peer:
        made = Peer(python)
        made._command = [sys.executable, str(script)]
        return made

    Peer = bench_routing.Peer
    monkeypatch.setattr(bench_routing, "Peer", peer)
    asked = ["bench", "routing", "--quick", "--rounds", "2", "--json", "--peer-python", sys.executable]
    result = CliRunner().invoke(cli, asked, catch_exceptions=False)
    document = json.loads(result.stdout)
    ratios = {name for name in document if name.endswith("_ratio")}
    selects = {f"select_{tokens}_tokens_ratio" for tokens in (500, 8000, 32000)}
    assert ratios == {"decision_512_to_8_workers_ratio", "match_512_ratio", "events_blocks_ratio", *selects}
    assert document["match_512_ratio"] == pytest.approx(document["ours_match_512_us"] / 1e9, rel=0.5)
    assert document["events_blocks_ratio"] > 1
    assert document["live"]["staleness_p50_ms"] > 0 and document["live"]["lookup_p50_us"] > 0
    assert {row["workers"] for row in document["table"]} == {8, 512}


def test_a_python_without_the_peer_is_named() -> None:
    peer = bench_routing.Peer(Path(sys.executable))
    with pytest.raises(ClusterError, match="are ai-dynamo-runtime and pyzmq installed there"), peer:
        pass
