"""A handler's signature: what it takes, checked at submit and rebuilt from wire values in the worker.

The conversion to annotations is msgspec's. Annotations that it does not know (protocols, classes of the user's)
are held by ``isinstance``; a parameter without annotation takes what comes.
"""

from __future__ import annotations

import functools
import inspect
import re
import typing
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any

import msgspec
from msgspec.inspect import type_info

from taskmesh.errors import ConfigurationError, InvalidArguments

_SIMPLE = (int, str, float, bool, bytes)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _rebuild(wanted: Any, value: Any) -> Any:
    """msgspec's hook for types that are not its own."""
    origin = typing.get_origin(wanted) or wanted
    if not isinstance(origin, type) or isinstance(value, origin):
        return value
    validate = getattr(origin, "model_validate", None)
    if validate is not None:
        return validate(value)
    raise ValueError(f"Expected `{origin.__qualname__}`, got `{type(value).__qualname__}`")


def convert(value: Any, wanted: Any) -> Any:
    """``value`` as the annotated type.

    Raises:
        msgspec.ValidationError: it does not fit.
    """
    try:
        return msgspec.convert(value, wanted, dec_hook=_rebuild)
    except TypeError:
        members = _members(wanted)
        if not members:
            raise
    # A union of a user's type with others, which msgspec does not take: the first member that fits.
    for member in members:
        try:
            return convert(value, member)
        except (ValueError, TypeError):
            pass
    raise ValueError(f"Expected `{wanted}`, got `{type(value).__qualname__}`")


def _members(wanted: Any) -> tuple[Any, ...]:
    """The members of a union; none of anything else."""
    return typing.get_args(wanted) if typing.get_origin(wanted) in (typing.Union, UnionType) else ()


def resolve_hints(function: Callable[..., Any], local_names: Mapping[str, Any]) -> dict[str, Any]:
    """A function's annotations, strings evaluated; ``local_names`` are those visible where it is defined.

    Raises:
        ConfigurationError: an annotation names something that cannot be found.
    """
    closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    try:
        return typing.get_type_hints(function, localns={**local_names, **closure})
    except NameError as error:
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigurationError(f"handler {name}: an annotation cannot be resolved: {error}") from None


def _description(wanted: Any) -> str:
    """A type in words, with what its fields are."""
    try:
        return repr(type_info(wanted))
    except Exception:  # a type of the user's that msgspec cannot look into
        return repr(wanted)


def _without_exceptions(wanted: Any) -> Any:
    """What a row's result is, where a batch handler may return an exception in its place."""
    kept = [m for m in _members(wanted) if not (isinstance(m, type) and issubclass(m, BaseException))]
    return typing.Union[tuple(kept)] if kept else wanted  # noqa: UP007


class Signature:
    """What a handler takes beside its Context.

    Attributes:
        context: the name of the parameter that takes the Context, or None.
        returns: the annotated type of the result (Any where there is none).
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        context_type: type,
        local_names: Mapping[str, Any],
        batch: bool,
    ) -> None:
        hints = resolve_hints(function, local_names)
        self._task = name
        self.returns = hints.pop("return", Any)
        self.context: str | None = None
        self._context_at: int | None = None
        parameters: list[inspect.Parameter] = []
        for place, parameter in enumerate(inspect.signature(function).parameters.values()):
            if hints.get(parameter.name) is context_type:
                self.context = parameter.name
                if parameter.kind is not parameter.KEYWORD_ONLY:
                    self._context_at = place
            else:
                parameters.append(parameter.replace(annotation=hints.get(parameter.name, Any)))
        if batch:
            parameters = [self._item_of(parameters)]
            self.returns = _without_exceptions(self._member(self.returns))
        self._signature = inspect.Signature(parameters)
        self._secret: frozenset[str] = frozenset()
        self._types = {parameter.name: parameter.annotation for parameter in parameters}
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._is_plain = len(positional) == len(parameters)
        required = sum(p.default is p.empty for p in positional)
        counts = range(required, len(positional) + 1) if self._is_plain else range(0)
        types = [p.annotation for p in positional]
        # By count of positional arguments: the tuple type that they convert to in one go, and the same where
        # no conversion can be needed.
        self._tuples = {n: tuple[tuple(types[:n])] if n else tuple[()] for n in counts}  # type: ignore[misc]
        self._exact = {
            n: tuple(types[:n]) for n in counts if all(any(t is s for s in _SIMPLE) for t in types[:n])
        }

    @functools.cached_property
    def fingerprint(self) -> int:
        """32 bits, never 0, that differ where another version of the program would take other arguments."""
        described = [
            (
                name,
                parameter.kind.name,
                parameter.default is parameter.empty,
                _description(parameter.annotation),
            )
            for name, parameter in self._signature.parameters.items()
        ]
        return zlib.crc32(_ADDRESS.sub("", repr(described)).encode()) or 1

    def _item_of(self, parameters: list[inspect.Parameter]) -> inspect.Parameter:
        if len(parameters) != 1:
            raise ConfigurationError(
                f"batch handler of task {self._task!r}: it takes one list of items (and a Context, if it likes)"
            )
        return parameters[0].replace(annotation=self._member(parameters[0].annotation))

    def _member(self, wanted: Any) -> Any:
        origin = typing.get_origin(wanted)
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return typing.get_args(wanted)[0]
        return Any

    def keep_secret(self, names: Sequence[str]) -> None:
        """Say nothing of the values of these parameters, not even when they do not fit.

        Raises:
            ConfigurationError: the handler has no such parameter.
        """
        for name in names:
            if name not in self._types:
                known = ", ".join(self._types) or "none"
                raise ConfigurationError(
                    f"task {self._task!r}: sensitive names {name!r}, which is no parameter (there are: {known})"
                )
        self._secret = frozenset(names)

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by parameter; None when they do not fit."""
        try:
            return dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError:
            return None

    def _fits(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call is plainly right as it stands: each argument exactly of its annotated simple type."""
        return not kwargs and tuple(map(type, args)) == self._exact.get(len(args))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See that a call would be taken.

        Raises:
            InvalidArguments: it would not; the message names the parameter.
        """
        if not self._fits(args, kwargs):
            self.convert(args, kwargs)

    def convert(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments as the handler's annotations want them.

        Raises:
            InvalidArguments: they do not fit.
        """
        if self._fits(args, kwargs):
            return args, kwargs
        if not kwargs:
            wanted = self._tuples.get(len(args))
            if wanted is not None:
                try:
                    return msgspec.convert(args, wanted, dec_hook=_rebuild), kwargs
                except (ValueError, TypeError):
                    pass  # below finds out which parameter it was
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise InvalidArguments(f"task {self._task!r}: {error}") from None
        for name, value in bound.arguments.items():
            bound.arguments[name] = self._convert_one(name, value)
        return bound.args, bound.kwargs

    def place(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with the Context where the handler takes it."""
        if self.context is None:
            return args, kwargs
        at = self._context_at
        if at is None or at > len(args):
            return args, {**kwargs, self.context: context}
        return (*args[:at], context, *args[at:]), kwargs

    def _convert_one(self, name: str, value: Any) -> Any:
        wanted = self._types[name]
        kind = self._signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            wanted = tuple[wanted, ...]  # type: ignore[valid-type]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            wanted = dict[str, wanted]  # type: ignore[valid-type]
        try:
            return convert(value, wanted)
        except (ValueError, TypeError) as error:
            why = "its value does not fit the annotation" if name in self._secret else error
            raise InvalidArguments(f"task {self._task!r}: argument {name!r}: {why}") from None
