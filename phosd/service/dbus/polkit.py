"""Who may do what: polkit decides where it runs, otherwise owners and root may.

The caller is named to polkit by its connection to the bus, which nobody else can have; a pid could
be another process's by the time polkit looks. Root is not asked about.
"""

import asyncio
import enum
import itertools
import logging
from collections.abc import Mapping

from phosd.bus import CallError, Connection, Variant
from phosd.errors import NotAuthorized, Timeout
from phosd.service.dbus.caller import Caller

QUICK = 25.0
"""Seconds that polkit may take for an answer when nobody is asked for a password."""
SLOW = 300.0
"""Seconds that somebody may take to type a password."""
REMEMBERED = 5.0
"""Seconds for which an answer about looking at what is others' holds."""

_NAME = "org.freedesktop.PolicyKit1"
_AUTHORITY = (f"/{_NAME.replace('.', '/')}/Authority", f"{_NAME}.Authority")
_MAY_ASK_USER = 1
_ABSENT = frozenset(
    {
        "org.freedesktop.DBus.Error.ServiceUnknown",
        "org.freedesktop.DBus.Error.NameHasNoOwner",
        "org.freedesktop.DBus.Error.Spawn.ServiceNotFound",
        "org.freedesktop.systemd1.NoSuchUnit",
        "org.freedesktop.systemd1.UnitMasked",
    }
)
"""Errors that mean that there is no polkit on this bus."""
_log = logging.getLogger(__name__)


class Action(enum.StrEnum):
    """What somebody may be allowed to do with what is theirs, or with what is others'."""

    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    VERIFY = "verify"
    DELETE = "delete"
    MIGRATE = "migrate"
    CANCEL = "cancel"
    RECOVER = "recover"

    def on(self, *, own: bool) -> str:
        """The name of the action for polkit."""
        return f"org.phos.{self}" if own else f"org.phos.{self}-others"


INSPECT = "org.phos.inspect-others"


class _Verdict(enum.Enum):
    YES = enum.auto()
    NO = enum.auto()
    ASK = enum.auto()
    """Yes, if somebody proves to be who may allow it."""
    ABSENT = enum.auto()
    """There is no polkit."""


class Rights:
    """Asks polkit for each caller. To be used on the event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._checks = itertools.count(1)
        self._inspecting: dict[str, tuple[float, bool]] = {}
        self._cancelling: set[asyncio.Task[None]] = set()

    async def require(
        self, caller: Caller, action: Action, owner: int, what: str, **details: str
    ) -> int:
        """Raise :class:`NotAuthorized` unless the caller may do this with what is ``owner``'s.

        ``what`` names the thing; rules of polkit see the ``details``. Returns the user id whose
        rights the engine is to go by: the caller's own, or root's for who may do it with others'.
        """
        if caller.uid == 0:
            return 0
        own = caller.uid == owner
        name = action.on(own=own)
        verdict = await self._check(caller, name, details | {"owner": str(owner)})
        if verdict is _Verdict.YES or (verdict is _Verdict.ABSENT and own):
            return owner if own else 0
        told = (
            f"uid {caller.uid} may not {action} {what}"
            if own
            else (f"{what} belongs to uid {owner}")
        )
        if verdict is _Verdict.ASK:
            hint = f"ask as root, or let polkit ask for a password ({name})"
        elif verdict is _Verdict.ABSENT:
            hint = "ask as its owner or as root"
        else:
            hint = f"ask as root, or have polkit allow {name}"
        raise NotAuthorized(told, hint=hint)

    async def inspects(self, caller: Caller) -> bool:
        """Whether the caller may see what belongs to others. Nobody is asked for a password."""
        if caller.uid == 0:
            return True
        now = asyncio.get_running_loop().time()
        until, known = self._inspecting.get(caller.name, (0.0, False))
        if now < until:
            return known
        quiet = Caller(caller.uid, caller.name)
        try:
            known = await self._check(quiet, INSPECT, {}) is _Verdict.YES
        except (NotAuthorized, Timeout) as error:
            _log.warning("%s", error)
            known = False
        self._inspecting = {n: v for n, v in self._inspecting.items() if v[0] > now}
        self._inspecting[caller.name] = (now + REMEMBERED, known)
        return known

    async def require_sight(self, caller: Caller, owner: int, what: str) -> None:
        """Raise :class:`NotAuthorized` unless the caller may see what is ``owner``'s."""
        if not caller.may_touch(owner) and not await self.inspects(caller):
            raise NotAuthorized(
                f"{what} belongs to uid {owner}", hint="ask as its owner or as root"
            )

    async def _check(self, caller: Caller, action: str, details: Mapping[str, str]) -> _Verdict:
        subject = ["system-bus-name", {"name": Variant("s", caller.name)}]
        flags = _MAY_ASK_USER if caller.interactive else 0
        ticket = f"phosd-{next(self._checks)}"
        patience = SLOW if caller.interactive else QUICK
        try:
            ((allowed, challenge, _),) = await self._connection.call(
                *_AUTHORITY,
                "CheckAuthorization",
                "(sa{sv})sa{ss}us",
                subject,
                action,
                dict(details),
                flags,
                ticket,
                destination=_NAME,
                patience=patience,
            )
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise
        except CallError as error:
            if error.name in _ABSENT:
                return _Verdict.ABSENT
            if error.name == "org.freedesktop.DBus.Error.NoReply":
                self._cancel(ticket)
                raise Timeout(
                    f"polkit gave no answer about {action} within {patience:.0f} s",
                    hint="ask again, or as root",
                ) from error
            raise NotAuthorized(
                f"polkit could not decide about {action}: {error.text}",
                hint="ask as root, or have systemd/org.phos.policy installed",
            ) from error
        if allowed:
            return _Verdict.YES
        return _Verdict.ASK if challenge else _Verdict.NO

    def _cancel(self, ticket: str) -> None:
        """Take back a question, and with it the dialogue that it may have opened."""

        async def cancel() -> None:
            try:
                await self._connection.call(
                    *_AUTHORITY, "CancelCheckAuthorization", "s", ticket, destination=_NAME
                )
            except CallError as error:  # it was answered meanwhile
                _log.debug("polkit did not take back %s: %s", ticket, error.text)

        task = asyncio.get_running_loop().create_task(cancel())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)
