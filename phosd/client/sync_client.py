"""Use phosd from a program that has no event loop.

The methods of :class:`Client` are made from those of :class:`AsyncClient`. Type checkers read
them in ``sync_client.pyi``, which ``python packaging/make_pages.py`` writes.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

from phosd.client.async_client import AsyncClient
from phosd.client.job_handle import AsyncJobHandle
from phosd.client.loop import Loop
from phosd.client.sync_job import JobHandle


class Client:
    """A connection to phosd, with the methods of :class:`AsyncClient`, which are not awaited. Those
    that start work return a :class:`JobHandle`. It may be used by several threads.

    Everything raises the errors of :mod:`phosd.errors`: each has a ``code`` (its class's name), the
    message, a ``hint`` what to do next, and where there is one a ``reason`` for programs.

        with Client() as client:
            image = client.checkpoint(4711).wait().result
    """

    def __init__(self, bus: str | None = None, *, interactive: bool = False) -> None:
        """Connect to phosd, as :meth:`AsyncClient.connect` does."""
        self._loop = Loop()
        try:
            self._client = self._loop.run(AsyncClient.connect(bus, interactive=interactive))
        except BaseException:
            self._loop.close()
            raise

    def close(self) -> None:
        """Disconnect. Jobs go on."""
        if not self._loop.closed:
            if self._loop.is_here:
                self._loop.run(self._client.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check(method: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Raise :class:`TypeError` in words of :class:`Client` for arguments that it does not take."""
    try:
        inspect.signature(method).bind(*args, **options)
    except TypeError as error:
        raise TypeError(f"Client.{method.__name__}: {error}") from None


def _awaited(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of :class:`Client` that awaits one of :class:`AsyncClient`."""

    @functools.wraps(method)
    def call(self: Client, *args: Any, **options: Any) -> Any:
        _check(method, self, *args, **options)
        found = self._loop.run(method(self._client, *args, **options))
        return JobHandle(self._loop, found) if isinstance(found, AsyncJobHandle) else found

    return call


def _each(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of :class:`Client` that yields what one of :class:`AsyncClient` yields."""

    @functools.wraps(method)
    def call(self: Client, *args: Any, **options: Any) -> Any:
        _check(method, self, *args, **options)
        return self._loop.each(method(self._client, *args, **options))

    return call


for _name, _method in vars(AsyncClient).items():
    if _name.startswith("_") or hasattr(Client, _name):
        continue
    if inspect.iscoroutinefunction(_method):
        setattr(Client, _name, _awaited(_method))
    elif inspect.isasyncgenfunction(_method):
        setattr(Client, _name, _each(_method))
