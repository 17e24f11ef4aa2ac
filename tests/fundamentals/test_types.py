"""What travels: arguments and results arrive as the handler's annotations say."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import uuid
from typing import Any

import msgspec
import pydantic
import pytest

from taskmesh import InvalidArguments, Mesh, TaskFailed, WorkerSettings
from tests.conftest import MakeMesh


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: float
    y: float


@dataclasses.dataclass
class Shape:
    name: str
    colour: Colour
    corners: list[Point]
    made: datetime.date


class Person(pydantic.BaseModel):
    name: str
    age: int = 0


class Row(msgspec.Struct):
    a: int
    b: str = ""


TRIANGLE = Shape(
    "triangle", Colour.RED, [Point(0, 0), Point(1, 0), Point(0, 1.5)], datetime.date(2024, 2, 29)
)
MOMENT = datetime.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=datetime.UTC)

VALUES: list[tuple[Any, Any]] = [
    (int, 2**40),
    (float, 1.5),
    (str, "grüße ☃"),
    (bytes, b"\x00\xff"),
    (bool, True),
    (None, None),
    (list[int], [1, 2]),
    (dict[str, list[float]], {"a": [1.0], "b": []}),
    (dict[int, str], {1: "one"}),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2, 3)),
    (set[int], {1, 2, 3}),
    (frozenset[str], frozenset({"a"})),
    (complex, 1 + 2j),
    (uuid.UUID, uuid.UUID(int=7)),
    (decimal.Decimal, decimal.Decimal("1.10")),
    (datetime.datetime, MOMENT),
    (datetime.date, datetime.date(2024, 2, 29)),
    (datetime.time, datetime.time(1, 2, 3)),
    (datetime.timedelta, datetime.timedelta(days=-1, microseconds=1)),
    (Colour, Colour.BLUE),
    (Point, Point(1.0, 2.0)),
    (Shape, TRIANGLE),
    (list[Shape], [TRIANGLE]),
    (dict[str, Point], {"p": Point(0.0, 1.0)}),
    (Row, Row(1, "x")),
    (Person, Person(name="ada", age=36)),
    (int | None, None),
    (Point | None, Point(1.0, 1.0)),
]


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=[str(kind) for kind, _ in VALUES])
async def test_values_arrive_as_annotated_and_come_back(mesh: Mesh, kind: Any, value: Any) -> None:
    seen: list[Any] = []

    async def echo(value: Any) -> Any:
        seen.append(value)
        return value

    echo.__annotations__ = {"value": kind, "return": kind}
    task = mesh.task(echo)
    async with mesh.worker():
        result = await (await task.submit(value)).result(timeout=5)
    assert seen == [value]
    assert result == value
    assert type(seen[0]) is type(result) is type(value)


async def test_values_without_annotation_arrive_as_the_wire_has_them(mesh: Mesh) -> None:
    @mesh.task
    async def echo(value):  # type: ignore[no-untyped-def]
        return value

    async with mesh.worker():
        assert await (await echo.submit(Point(1, 2))).result(timeout=5) == {"x": 1, "y": 2}
        assert await (await echo.submit((1, {2}, MOMENT))).result(timeout=5) == [1, {2}, MOMENT]


async def test_numpy_arrays_travel(mesh: Mesh) -> None:
    numpy = pytest.importorskip("numpy")

    @mesh.task
    async def scale(array: numpy.ndarray, factor: float) -> numpy.ndarray:  # type: ignore[name-defined]
        return array * factor

    async with mesh.worker():
        array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
        result = await (await scale.submit(array, 2.0)).result(timeout=5)
    assert result.dtype == numpy.float32
    assert (result == array * 2).all()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "missing a required argument: 'to'"),
        (("a", 1, 2), "too many positional arguments"),
        ((5,), "argument 'to': Expected `str`, got `int`"),
        (("a", "many"), "argument 'times': Expected `int`, got `str`"),
    ],
)
async def test_arguments_that_do_not_fit_are_refused_at_submit(
    mesh: Mesh, arguments: tuple[Any, ...], complaint: str
) -> None:
    @mesh.task
    async def send(to: str, times: int = 1) -> None: ...

    with pytest.raises(InvalidArguments, match="task 'send'") as refused:
        await send.submit(*arguments)
    assert complaint in str(refused.value)


async def test_an_argument_that_cannot_travel_is_refused_at_submit(mesh: Mesh) -> None:
    @mesh.task
    async def take(thing: object) -> None: ...

    with pytest.raises(InvalidArguments, match="cannot travel"):
        await take.submit(lambda: None)
    with pytest.raises(InvalidArguments, match="cannot travel"):
        await take.submit(2**80)


async def test_arguments_that_no_worker_takes_fail_the_task_when_patience_runs_out(
    mesh: Mesh, make_mesh: MakeMesh
) -> None:
    @mesh.task
    async def measure(size: str) -> None: ...

    newer = make_mesh()

    @newer.task(name="measure")
    async def measure_newer(size: int) -> None: ...

    async with newer, newer.worker(WorkerSettings(misfit_patience=0)):
        with pytest.raises(TaskFailed, match="InvalidArguments"):
            await (await measure.submit("large")).result(timeout=5)


async def test_a_result_that_cannot_travel_fails_the_task(mesh: Mesh) -> None:
    class Unfit:
        def model_dump(self) -> None:
            raise LookupError("cannot be dumped")

    @mesh.task
    async def make(kind: str) -> Any:
        return Unfit() if kind == "raises" else object()

    async with mesh.worker():
        for kind in ("unknown", "raises"):
            with pytest.raises(TaskFailed, match="cannot travel"):
                await (await make.submit(kind)).result(timeout=5)
        assert await make("unknown") is not None
