"""JSON schemas of data sets, which refer to nothing but themselves. Runs in the process of a reward.

jsonschema fetches by itself what a schema refers to, from the network or from a file: a row of a data set could reach
whatever this machine reaches.
"""

from __future__ import annotations

from typing import Any

import jsonschema_specifications
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import Specification, specification_with

_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")

_SIMPLE: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values without depth: a schema that refers to itself without end for one of these does so for every response."""


def validator(schema: Any) -> Any:
    """Returns the validator of a schema; one that names no draft, or an unknown one, is read as 2020-12.

    Raises:
        ValueError: `schema` is no schema, refers to itself without end, or refers to something that is neither in it
            nor a draft of JSON schema. Nothing is fetched.
    """
    if not isinstance(schema, dict | bool):
        raise ValueError(f"not a JSON schema: {type(schema).__name__}, expected an object")
    kind: Any = validator_for(schema)
    specification = specification_with(kind.ID_OF(kind.META_SCHEMA))
    try:
        kind.check_schema(schema)
        # Without a registry of its own, jsonschema would fetch.
        made = kind(schema, registry=Registry())
        resolver = jsonschema_specifications.REGISTRY.resolver_with_root(specification.create_resource(schema))
        _check_references(specification, schema, resolver, set())
        for value in _SIMPLE:
            made.is_valid(value)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: {error.message[:200]}") from error
    except RecursionError as error:
        raise ValueError("the JSON schema refers to itself without end, or is nested too deep") from error
    return made


def mistake(made: Any, value: Any) -> str | None:
    """Returns what is most wrong about a value by a `validator`, and its place; None if nothing is."""
    wrong = best_match(made.iter_errors(value))
    return None if wrong is None else f"{wrong.json_path[1:]}: {wrong.message}"


def _check_references(specification: Specification[Any], schema: Any, resolver: Any, seen: set[int]) -> None:
    """Raises ValueError if a schema, one in it, or one that it refers to, refers to something that is not there.

    Args:
        resolver: resolver of references in the schema.
        seen: ids of the schemas that were checked; grows.
    """
    if id(schema) in seen:
        return
    seen.add(id(schema))
    for name in _REFERENCES if isinstance(schema, dict) else ():
        reference = schema.get(name)
        if not isinstance(reference, str):
            continue
        try:
            found = resolver.lookup(reference)
        except Unresolvable as error:
            raise ValueError(
                f"the JSON schema has {name} {reference[:200]!r}; expected one that leads to a place in the schema,"
                " like '#/$defs/a': nothing is fetched"
            ) from error
        _check_references(specification, found.contents, found.resolver, seen)
    for part in specification.create_resource(schema).subresources():
        _check_references(specification, part.contents, resolver.in_subresource(part), seen)
