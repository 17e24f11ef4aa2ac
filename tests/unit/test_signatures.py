"""What a handler takes: checked at submit, rebuilt in the worker."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from taskmesh.errors import ConfigurationError, InvalidArguments
from taskmesh.signatures import Signature, convert
from taskmesh.tasks import Context


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Custom:
    pass


def signature(function: Any, batch: bool = False, **local_names: Any) -> Signature:
    return Signature(function, "t", Context, local_names, batch)


def test_arguments_become_what_the_annotations_say() -> None:
    def handler(p: Point, n: float, *more: int, flag: bool = False, **rest: str) -> None: ...

    args, kwargs = signature(handler).convert(({"x": 1}, 2, 3, 4), {"flag": True, "name": "n"})
    assert args == (Point(1), 2.0, 3, 4)
    assert kwargs == {"flag": True, "name": "n"}


@pytest.mark.parametrize(
    ("args", "kwargs", "complaint"),
    [
        ((), {}, "missing a required argument: 'a'"),
        ((1, "b", 3), {}, "too many positional arguments"),
        ((1,), {"c": 1}, "unexpected keyword argument 'c'"),
        (("x",), {}, "argument 'a'"),
        ((1, 2), {}, "argument 'b'"),
        ((1,), {"b": None}, "argument 'b'"),
    ],
)
def test_a_call_that_does_not_fit_names_the_task_and_the_parameter(
    args: tuple[Any, ...], kwargs: dict[str, Any], complaint: str
) -> None:
    def handler(a: int, b: str = "") -> None: ...

    with pytest.raises(InvalidArguments, match="task 't'") as caught:
        signature(handler).check(args, kwargs)
    assert complaint in str(caught.value)


def test_a_bool_is_no_int_and_a_float_no_whole_number() -> None:
    def handler(n: int) -> None: ...

    with pytest.raises(InvalidArguments):
        signature(handler).check((1.5,), {})
    signature(handler).check((1,), {})


def test_parameters_without_annotation_take_what_comes() -> None:
    def handler(anything, *args, **kwargs):  # type: ignore[no-untyped-def]
        ...

    thing = object()
    assert signature(handler).convert((thing, 1), {"k": thing}) == ((thing, 1), {"k": thing})


def test_classes_of_the_users_are_held_by_isinstance() -> None:
    def handler(thing: Custom, maybe: Custom | None = None, several: Custom | int | str = 0) -> None: ...

    made = Custom()
    assert signature(handler).convert((made, None, "s"), {}) == ((made, None, "s"), {})
    assert signature(handler).convert((made, made, made), {}) == ((made, made, made), {})
    with pytest.raises(InvalidArguments, match="Expected `Custom`, got `int`"):
        signature(handler).check((5,), {})
    with pytest.raises(InvalidArguments):
        signature(handler).check((made, None, [1]), {})


@pytest.mark.parametrize(
    ("args", "placed"),
    [((1, 2), ("C", 1, 2)), ((1,), ("C", 1)), ((), ("C",))],
)
def test_a_leading_context_comes_before_the_arguments(args: tuple[int, ...], placed: tuple[Any, ...]) -> None:
    def handler(ctx: Context, a: int = 0, b: int = 0) -> None: ...

    assert signature(handler).place(args, {}, "C") == (placed, {})


def test_a_context_anywhere_else_finds_its_place_too() -> None:
    def middle(a: int, ctx: Context, b: int = 0) -> tuple[Any, ...]:
        return a, ctx, b

    def last(a: int = 0, ctx: Context | None = None) -> None: ...

    def keyword(a: int, *, ctx: Context) -> tuple[Any, ...]:
        return a, ctx

    for args, kwargs in (((1, 2), {}), ((1,), {"b": 2})):
        found = signature(middle)
        placed, named = found.place(*found.convert(args, kwargs), "C")
        assert middle(*placed, **named) == (1, "C", 2)
    placed, named = signature(keyword).place((1,), {}, "C")
    assert keyword(*placed, **named) == (1, "C")
    assert signature(last).context is None  # an optional Context is an ordinary parameter


def test_annotations_may_name_what_is_local_to_the_definition() -> None:
    class Local:
        pass

    def handler(thing: Local) -> None: ...

    handler.__annotations__ = {"thing": "Local"}
    made = Local()
    assert signature(handler, Local=Local).convert((made,), {}) == ((made,), {})
    with pytest.raises(ConfigurationError, match="Local"):
        signature(handler)


def test_a_batch_signature_is_that_of_one_item() -> None:
    def handler(rows: list[Point], ctx: Context) -> list[int | Exception]:
        return []

    found = signature(handler, batch=True)
    assert found.convert(({"x": 1},), {}) == ((Point(1),), {})
    assert found.returns is int
    with pytest.raises(InvalidArguments):
        found.check(([{"x": 1}],), {})


def test_unions_of_the_users_types_take_the_first_member_that_fits() -> None:
    assert convert(1, Custom | int) == 1
    assert convert({"x": 1}, Custom | Point) == Point(1)
    with pytest.raises(ValueError, match="Expected"):
        convert("s", Custom | int)
