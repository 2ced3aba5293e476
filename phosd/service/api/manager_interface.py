"""``org.phos.Manager1`` as the bus sees it."""

from phosd.bus import ROOT
from phosd.service.api.manager import Manager
from phosd.service.dbus.spec import Args, Event, Interface, Method, Property

_OPTIONS: tuple[str, str] = ("options", "a{sv}")
_JOB: Args = (("job", "o"),)


def publish(manager: Manager) -> None:
    """Put the manager on its bus."""
    manager.tree.publish(ROOT, manager_interface(manager), manager, owner=None)


def manager_interface(manager: Manager) -> Interface:
    """Every method that starts work gives a job at once; options that are not known are errors."""
    return Interface(
        "org.phos.Manager1",
        (
            Method("Checkpoint", (("pid", "u"), _OPTIONS), _JOB, manager.checkpoint),
            Method("Restore", (("image", "s"), _OPTIONS), _JOB, manager.restore),
            Method("VerifyImage", (("image", "s"), _OPTIONS), _JOB, manager.verify_image),
            Method("DeleteImage", (("image", "s"), _OPTIONS), (), manager.delete_image),
            Method(
                "Migrate",
                (("pid", "u"), ("destination", "s"), _OPTIONS),
                _JOB,
                manager.moves.migrate,
            ),
            Method("Suspend", (("pid", "u"), _OPTIONS), _JOB, manager.moves.suspend),
            Method("Resume", (("pid", "u"), _OPTIONS), _JOB, manager.moves.resume),
            Method(
                "Swap",
                (("leaving", "u"), ("coming", "u"), _OPTIONS),
                _JOB,
                manager.moves.swap,
            ),
            Method(
                "PlanEvacuation",
                (("gpu", "s"), _OPTIONS),
                (("steps", "a(ustsss)"),),
                manager.moves.plan_evacuation,
            ),
            Method("Recover", (("pid", "u"), _OPTIONS), (("done", "s"),), manager.recover),
            Method("GetProcess", (("pid", "u"),), (("process", "o"),), manager.lists.get_process),
            Method(
                "ListProcesses", (), (("processes", "a(uustsso)"),), manager.lists.list_processes
            ),
            Method("ListImages", (), (("images", "a(stuttso)"),), manager.lists.list_images),
            Method("ListJobs", (), (("jobs", "a(ussso)"),), manager.lists.list_jobs),
            Method("ListGPUs", (), (("gpus", "a(usstto)"),), manager.lists.list_gpus),
            Method("ListHistory", (_OPTIONS,), (("jobs", "aa{sv}"),), manager.lists.list_history),
            Method("ListEvents", (_OPTIONS,), (("events", "aa{sv}"),), manager.lists.list_events),
        ),
        (
            Property("Version", "s", lambda m: m.version, constant=True),
            Property("Features", "as", lambda m: list(m.features), constant=True),
            Property("GPUs", "ao", lambda m: sorted(m.inventory.gpus)),
            Property("Troubles", "as", lambda m: m.upkeep.troubles, private=True),
        ),
        (
            Event("JobNew", (("job", "o"),)),
            Event("JobRemoved", (("job", "o"), ("result", "s"))),
            Event("ProcessNew", (("process", "o"),)),
            Event("ProcessRemoved", (("process", "o"),)),
            Event("ImageNew", (("image", "o"),)),
            Event("ImageRemoved", (("image", "o"),)),
            Event("EventNew", (("severity", "s"), ("kind", "s"))),
        ),
    )
