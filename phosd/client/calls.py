"""Call the methods of phosd's objects, each by its name, signature and arguments on D-Bus."""

from typing import Any

from phosd.bus import ROOT, variants
from phosd.client.daemon import IMAGE, JOB, MANAGER, PROCESS
from phosd.client.evacuation import Step
from phosd.client.rows import first_page, next_page

Option = bool | int | float | str
Row = dict[str, Any]


class Calls:
    """The methods, on top of :meth:`_call`. Those that start work return the path of its job."""

    async def _call(self, path: str, interface: str, member: str, *call: Any) -> Any:
        """Call a method, ``call`` being its signature and arguments, and return the first value
        of its reply, or None.
        """
        raise NotImplementedError

    async def _manager(self, member: str, signature: str = "", *args: Any) -> Any:
        return await self._call(ROOT, MANAGER, member, signature, *args)

    async def get_process(self, pid: int) -> str:
        """Return the path of a process."""
        return str(await self._manager("GetProcess", "u", pid))

    async def get_image(self, image: str) -> str:
        """Return the path of an image."""
        return str(await self._manager("GetImage", "s", image))

    async def get_job(self, number: int) -> str:
        """Return the path of a job."""
        return str(await self._manager("GetJob", "u", number))

    async def checkpoint(self, pid: int, **options: Option) -> str:
        """Checkpoint a process; return the path of the job, or ``/`` when this ended a schedule."""
        return str(await self._manager("Checkpoint", "ua{sv}", pid, variants(options)))

    async def go_on(self, pid: int) -> None:
        """Let a process go on that a checkpoint holds."""
        await self._manager("Continue", "ua{sv}", pid, {})

    async def restore(self, image: str, **options: Option) -> str:
        """Restore an image; return the path of the job."""
        return str(await self._manager("Restore", "sa{sv}", image, variants(options)))

    async def make_pid_namespace(self, socket: str, **options: Option) -> int:
        """Have a pid namespace made, whose first process connects to an abstract socket of ours to
        be told what to start; return the pid of that process.
        """
        return int(await self._manager("MakePidNamespace", "sa{sv}", socket, variants(options)))

    async def verify(self, image: str, **options: Option) -> str:
        """Verify every byte of an image; return the path of the job."""
        return str(await self._manager("VerifyImage", "sa{sv}", image, variants(options)))

    async def delete(self, image: str) -> None:
        """Delete an image."""
        await self._manager("DeleteImage", "sa{sv}", image, {})

    async def note(self, image: str, text: str) -> None:
        """Write the note of an image."""
        path = await self.get_image(image)
        await self._call(path, IMAGE, "SetNote", "sa{sv}", text, {})

    async def migrate(self, pid: int, destination: str, **options: Option) -> str:
        """Move a process to another GPU; return the path of the job."""
        return str(await self._manager("Migrate", "usa{sv}", pid, destination, variants(options)))

    async def suspend(self, pid: int, **options: Option) -> str:
        """Take a process off its GPUs; return the path of the job."""
        return str(await self._manager("Suspend", "ua{sv}", pid, variants(options)))

    async def resume(self, pid: int, **options: Option) -> str:
        """Resume a suspended process; return the path of the job."""
        return str(await self._manager("Resume", "ua{sv}", pid, variants(options)))

    async def swap(self, leaving: int, coming: int, **options: Option) -> str:
        """Suspend a process and resume another in its place; return the path of the job."""
        return str(await self._manager("Swap", "uua{sv}", leaving, coming, variants(options)))

    async def recover(self, pid: int) -> str:
        """Recover a process that was left stopped; return what was done once that is complete."""
        return str(await self._manager("Recover", "ua{sv}", pid, {}))

    async def cancel(self, job: str) -> None:
        """Cancel the job of a path at its next safe point."""
        await self._call(job, JOB, "Cancel", "a{sv}", {})

    async def kernels(self, pid: int, **options: Option) -> list[Row]:
        """Return what is known of the kernels of a process, as rows of ``DescribeKernels``."""
        path = await self.get_process(pid)
        return list(await self._call(path, PROCESS, "DescribeKernels", "a{sv}", variants(options)))

    async def analyse_kernels(self, pid: int, **options: Option) -> int:
        """Have a process's kernels analysed before others; return how many are still to be."""
        path = await self.get_process(pid)
        return int(await self._call(path, PROCESS, "AnalyseKernels", "a{sv}", variants(options)))

    async def try_checkpoint(self, pid: int, **options: Option) -> list[tuple[str, str, str]]:
        """Return what is checked before a checkpoint, as rows of ``TryCheckpoint``."""
        return list(await self._manager("TryCheckpoint", "ua{sv}", pid, variants(options)))

    async def try_restore(self, image: str, **options: Option) -> list[tuple[str, str, str]]:
        """Return what is checked before a restore, as rows of ``TryRestore``."""
        return list(await self._manager("TryRestore", "sa{sv}", image, variants(options)))

    async def plan_evacuation(self, gpu: str) -> list[Step]:
        """Return what clears a GPU of the processes that may be seen."""
        return [Step(*row) for row in await self._manager("PlanEvacuation", "sa{sv}", gpu, {})]

    async def history(self, limit: int, **options: int | str) -> list[Row]:
        """Return at most ``limit`` past jobs, newest first, as rows of ``ListHistory``."""
        rows: list[Row] = []
        page: dict[str, Any] | None = first_page({"limit": limit, **options})
        while page is not None:
            found = await self._manager("ListHistory", "a{sv}", variants(page))
            rows += found
            page = next_page(page, found, limit - len(rows))
        return rows

    async def events(self, **options: int | str) -> list[Row]:
        """Return events, newest first, as rows of ``ListEvents``."""
        return list(await self._manager("ListEvents", "a{sv}", variants(options)))
