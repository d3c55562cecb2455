"""Chat templates are rendered as transformers renders them, in a sandbox, in bounded time."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from kvhive.proto.errors import InvalidRequest, ModelError
from kvhive.router.chat.template import ChatTemplate

HI = [{"role": "user", "content": "hi <b>&'\"</b> é"}]
LONG = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(9)]
TEMPLATES = [
    "{% for m in messages %}\n  {{ m.role }}: {{ m['content'] | trim }}\n{% endfor %}\nend",
    "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m }}{% endfor %}",
    "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ {'b': 1, 'a': 2} | tojson }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% if tools is none %}no tools{% endif %}{% if not documents %}, no docs{% endif %}{{ missing }}",
    "{%- if add_generation_prompt -%} go {%- endif -%} {{ '-' * 5 }}{{ range(3) | list }}",
]


@pytest.mark.parametrize("source", TEMPLATES)
def test_rendering_equals_transformers(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for messages in (HI, LONG):
        theirs, _ = render_jinja_template(
            conversations=[messages], chat_template=source, add_generation_prompt=True, bos_token="<s>"
        )
        assert ChatTemplate(source, {"bos_token": "<s>"}).render(messages) == theirs[0]


def test_the_wall_clock_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2024, 2, 29))
    assert template.render(HI) == "29 Feb 2024"


def test_a_refusal_carries_the_templates_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match=r"messages: .*roles must alternate"):
        template.render(HI)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[99].content }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ 'x' * 100000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{{ range(1000000) | length }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_unsafe_and_broken_templates_are_refused_at_once(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"^messages: "):
        ChatTemplate(source, {}).render(HI)
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for a in range(999) %}{% for b in range(9999) %}{% set c = messages.a %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}",
    ],
)
def test_a_runaway_template_ends_at_its_deadline(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match="took too long"):
        ChatTemplate(source, {}, timeout_s=0.2).render(HI)
    assert time.monotonic() - start < 2


def test_a_template_that_cannot_be_compiled_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})
