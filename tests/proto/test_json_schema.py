"""A schema is read as what it says, or refused by the name of what is not read."""

from __future__ import annotations

import json

import pytest
from grammar_vocabulary import TINY

from kvhive.proto.errors import InvalidRequest
from kvhive.proto.grammar import MAX_INDENT, new_matcher, schema_in_lark
from kvhive.proto.json_schema import MAX_SCHEMA_DEPTH, MAX_SCHEMA_VALUES, exact_schema, read_schema
from kvhive.proto.token_vocabulary import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(TINY)


@pytest.fixture
def allows(tokenizer):
    def ask(schema, text, kind="json_schema"):
        matcher = new_matcher(tokenizer, kind, json.dumps(schema) if kind == "json_schema" else schema)
        data = list(text.encode())
        return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()

    return ask


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # What the library alone gets wrong, each found by comparing it with a validator.
        ({"type": "string", "pattern": '^[^"]$'}, '"a"', r'"\""'),
        ({"type": "string", "pattern": r"^[^\x5c]$"}, '"a"', r'"\\"'),
        ({"type": "string", "pattern": r"^[\x00-\x21]$"}, '"!"', r'"\""'),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.33}, "0.2", "0"),
        ({"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, "-0.2", "-0"),
        ({"type": "integer", "exclusiveMinimum": 7, "minimum": 3}, "8", "7"),
        ({"type": "integer", "exclusiveMaximum": 7, "maximum": 7}, "6", "7"),
        # What must not be put differently.
        (
            {"enum": [{"pattern": '[^"]', "exclusiveMinimum": 0}]},
            '{"pattern":"[^\\"]","exclusiveMinimum":0}',
            "{}",
        ),
        (
            {"properties": {"pattern": {"type": "null"}}, "type": "object"},
            '{"pattern":null}',
            '{"pattern":"["}',
        ),
    ],
)
def test_it_allows_what_is_said(allows, schema, right, wrong):
    assert allows(schema, right) and not allows(schema, wrong)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"const": 1}}, "contains"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"type": "object", "propertyNames": {"pattern": "a"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"oneOf": [{"minimum": 1}, {"maximum": 2}]}, "oneOf"),
        ({"type": "string", "format": "int32"}, "int32"),
        ({"$ref": "http://example.com/other"}, "example.com"),
        ({"type": "object", "x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"type": "array", "items": {"x-guidance": {}}}, "x-guidance"),
        ({"prefixItems": [{"type": "null"}], "additionalItems": False}, "additionalItems"),
        ({"minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"const": 12345678901234567890}, "2\\*\\*53"),
        ({"maximum": 1e300}, "2\\*\\*53"),
        ({"maximum": 10**400}, r"2\*\*53 either way, is 10{23}\.\.\.$"),
        ({"const": {"a": [-(10**400)]}}, "2\\*\\*53"),
        ({"minProperties": 10**400}, r"minProperties.*, is 10{23}\.\.\.$"),
        ({"allOf": [{"minProperties": 2}]}, "minProperties"),
        ({"type": "object", "patternProperties": {'^[^"]$': {}}}, "patternProperties"),
        ({"const": {"pattern": "[^a]"}, "$ref": "#/const"}, "ref"),
        ({"properties": {"a": {"enum": [{"pattern": "[^a]"}]}}, "$ref": "#/properties/a/enum/0"}, "ref"),
        ({"const": {"pattern": "[^a]"}, "$ref": "#/%63onst"}, "ref"),
        ({"properties": {"properties": {"const": {}}}, "$ref": "#/properties/properties/const"}, "ref"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
        ({"type": "objekt"}, "objekt"),
        ({"type": "string", "pattern": "a(?=b)"}, "look"),
        ({"type": "object", "properties": {"a": {"pattern": "("}}, "required": ["a"]}, "regex"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tokenizer, schema, named):
    with pytest.raises(InvalidRequest, match=f"response_format: .*{named}"):
        new_matcher(tokenizer, "json_schema", json.dumps(schema))


@pytest.mark.parametrize("name", ["constants", "enum_kind", "default", "examples", "const", "properties"])
@pytest.mark.parametrize("holder", ["$defs", "definitions"])
def test_a_schema_may_have_the_name_of_a_keyword(allows, holder, name):
    schema = {"$ref": f"#/{holder}/{name}", holder: {name: {"type": "boolean"}}}
    assert allows(schema, "true") and not allows(schema, "1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a JSON object, is not JSON"),
        ('{"exclusiveMinimum": NaN}', "NaN"),
        (r'{"const": "\ud800"}', r"lone surrogate U\+D800"),
        ('"text"', "must be a JSON object, is str"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 40 + "{}" + "}" * 40, None),
        ('{"a":' * MAX_SCHEMA_DEPTH + "{}" + "}" * MAX_SCHEMA_DEPTH, f"at most {MAX_SCHEMA_DEPTH} deep"),
        (json.dumps({"enum": list(range(MAX_SCHEMA_VALUES))}), f"at most {MAX_SCHEMA_VALUES} values"),
    ],
)
def test_its_size_is_bounded(text, message):
    if message is None:
        exact_schema(read_schema(text))
        return
    with pytest.raises(InvalidRequest, match=f"response_format: a schema .*{message}"):
        read_schema(text)


@pytest.mark.parametrize("kind", ["json_object", "json_schema", "lark"])
def test_white_space_between_the_parts_is_bounded(allows, kind):
    schema = {"type": "object"}
    text = {"json_object": "", "json_schema": schema, "lark": f"start: %json {schema_in_lark(schema)}"}[kind]
    for fine in ('{"a":1}', '{ "a": 1 }', '{\n  "a": 1\n}', '{\n\t"a":\n' + " " * MAX_INDENT + "1}", "{}"):
        assert allows(text, fine, kind), fine
    for endless in (
        '{  "a":1}',
        '{"a":\n\n1}',
        '{"a":\n' + " " * (MAX_INDENT + 1) + "1}",
        " {}",
        "{} ",
        "{}\n",
    ):
        assert not allows(text, endless, kind), endless


def test_any_object_is_one_and_nothing_else_is(allows):
    assert allows("", '{"a":[1,{"b":null}],"ü":"\\n"}', "json_object")
    for other in ("[]", "1", '"a"', '{"a"}', '{"a":1'):
        assert not allows("", other, "json_object")


def test_a_kind_must_be_known(tokenizer):
    with pytest.raises(InvalidRequest, match=r'must be one of json_object, .*, is "xml"'):
        new_matcher(tokenizer, "xml", "")
