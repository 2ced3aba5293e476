"""Wire the parts of the service together."""

from phosd.bus import ROOT, Connection
from phosd.engine.job.journal import Journal
from phosd.interface.manager import MANAGER
from phosd.interface.methods import GPU, IMAGE, JOB, POOL, PROCESS
from phosd.service.api.images import Images
from phosd.service.api.inventory import Inventory
from phosd.service.api.job_interface import JOB_READERS, JobMethods
from phosd.service.api.job_reports import JobReports
from phosd.service.api.listing import Listing
from phosd.service.api.maintenance import Maintenance
from phosd.service.api.manager import MANAGER_READERS, Manager
from phosd.service.api.moves import Moves
from phosd.service.api.namespaces import Namespaces
from phosd.service.api.object_interfaces import (
    GPU_READERS,
    IMAGE_READERS,
    POOL_READERS,
    PROCESS_READERS,
    ObjectInterfaces,
)
from phosd.service.api.object_methods import GpuMethods, ImageMethods, ProcessMethods
from phosd.service.api.pool_objects import show_pool
from phosd.service.api.pools import PoolMethods
from phosd.service.api.pruning import Pruning
from phosd.service.api.storage import Storage
from phosd.service.api.transfers import Transfers
from phosd.service.config import Config
from phosd.service.dbus.caller_pids import CallerPids
from phosd.service.dbus.object_tree import ObjectTree
from phosd.service.dbus.polkit import Rights
from phosd.service.dbus.query_pool import QueryPool
from phosd.service.dbus.spec import serve
from phosd.service.history.history import History
from phosd.service.jobs.engine import Engine
from phosd.service.jobs.table import JobTable
from phosd.service.samples import Samples
from phosd.service.tasks.analyses import Analyses
from phosd.service.tasks.checkpoints import Checkpoints
from phosd.service.tasks.own_checkpoints import OwnCheckpoints
from phosd.service.tasks.periodic import Periodic
from phosd.service.tasks.pools import Pools
from phosd.service.tasks.runtime_checkpoints import RuntimeCheckpoints
from phosd.service.tasks.sleepers import Sleepers
from phosd.service.tasks.verifications import Verifications


def compose(config: Config, engine: Engine, connection: Connection, history: History) -> Manager:
    """Return a manager with all its parts, its methods published on the bus.

    Parts that need each other get functions that look up the later one when called.
    """
    # Long reads and slow programs must not delay scans of the node.
    rights, query_pool = Rights(connection), QueryPool()
    tree = ObjectTree(connection, rights.inspects)
    samples, journal = Samples(), Journal(config.runtime_dir / "journal")
    job_object = serve(JOB, JOB_READERS, JobMethods(rights, lambda job: jobs.cancel(job)))
    reports = JobReports(
        *(journal, history, tree, job_object),
        lambda job: manager.publish_results(job),
        lambda job: manager.job_ended(job),
    )
    jobs = JobTable(reports.listener(), history.next_job(), config.job_limits)
    submitting = engine, history, jobs, reports.write_down
    checkpoints = Checkpoints(*submitting, lambda pid: inventory.subject(pid))
    verifications = Verifications(*submitting)
    pools = Pools(*submitting, lambda kept: show_pool(tree, interfaces.pool, kept))
    periodic = Periodic(
        *(checkpoints, jobs, history, config.periodic),
        lambda target: inventory.renew(target.pid),
        lambda target: inventory.suspended(target.pid),
        verifications.rehearse_next,
    )
    parts = (engine, history, rights, query_pool)
    interfaces = _interfaces(
        ProcessMethods(*parts, lambda: analyses.wake()),
        ImageMethods(*parts, lambda: inventory.refresh_images()),
        GpuMethods(samples),
    )
    sleepers = Sleepers(*submitting, query_pool, lambda: inventory)
    of_programs = periodic, sleepers, pools
    inventory = Inventory(config, engine, tree, history, *of_programs, interfaces, samples)
    kept = config, engine, history, jobs, inventory, *of_programs
    maintenance = Maintenance(*kept, lambda: tree.changed(ROOT))
    analyses = Analyses(engine, lambda: [*inventory.processes.values()], lambda: jobs.running > 0)
    own = OwnCheckpoints(
        *(config.runtime_dir, engine, checkpoints, jobs, rights, query_pool, inventory.knows),
        inventory.refresh_processes,
    )
    runtimes = RuntimeCheckpoints(config.runtime_dir, *submitting)
    manager = Manager(
        *(config, engine, history, journal, tree, jobs, periodic, own, runtimes, query_pool),
        *(inventory, maintenance, analyses, pools, sleepers),
    )
    pids = CallerPids(config.runtime_dir, connection.pid_of, query_pool)
    served = serve(
        *(MANAGER, MANAGER_READERS),
        Images(
            *(engine, history, jobs, rights, checkpoints, verifications, periodic, query_pool),
            *(pids, inventory, pools, reports.write_down),
        ),
        PoolMethods(engine, pools, rights),
        Moves(engine, jobs, inventory, sleepers, rights, query_pool, pids, reports.write_down),
        Listing(inventory, jobs, history, rights, query_pool, pids),
        Storage(inventory, rights, query_pool, lambda: manager.config),
        Pruning(engine, history, jobs, pools, query_pool),
        Namespaces(engine, connection.pid_of, query_pool),
        Transfers(engine, jobs, rights, query_pool, reports.write_down),
    )
    tree.publish(ROOT, served, manager, owner=None)
    return manager


def _interfaces(
    of_processes: ProcessMethods, of_images: ImageMethods, of_gpus: GpuMethods
) -> ObjectInterfaces:
    return ObjectInterfaces(
        serve(PROCESS, PROCESS_READERS, of_processes),
        serve(IMAGE, IMAGE_READERS, of_images),
        serve(POOL, POOL_READERS),
        serve(GPU, GPU_READERS, of_gpus),
    )
