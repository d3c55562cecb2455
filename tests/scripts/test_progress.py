"""Progress in a pipe: plain lines, no flood, no control characters."""

import io

from kvhive.scripts.progress import show_progress


def test_a_pipe_gets_one_plain_line_per_change() -> None:
    stream = io.StringIO()
    with show_progress(stream) as report:
        for text in ("loading", "loading", "serving", "serving"):
            report("w1", text)
        report("w2", "loading")
    assert stream.getvalue() == "w1: loading\nw1: serving\nw2: loading\n"


def test_a_counter_does_not_flood_a_pipe() -> None:
    stream = io.StringIO()
    with show_progress(stream) as report:
        for percent in range(100):
            report("w1", f"loading {percent} %")
        report("w1", "serving")
    assert stream.getvalue() == "w1: loading 0 %\nw1: serving\n"
