"""Images that this phosd cannot read: in no list, but told, and deleted by who may."""

import os

from phosd.errors import ImageCorrupt
from tests.support.harness import wait_until
from tests.support.service import ROOT, Service
from tests.system.service.test_jobs import wait_for

OLD = "image old has format 0, this phosd reads 1; restore it with the phosd that made it"


def troubles(service: Service) -> str:
    return service.get(ROOT, "Manager1", "Troubles")


def test_an_image_that_cannot_be_read_is_told(service: Service) -> None:
    assert troubles(service) == "0"
    service.engine.unreadable["old"] = ImageCorrupt(*OLD.split("; "))
    service.engine.go.set()
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
    wait_until(lambda: OLD in troubles(service), "the trouble")
    assert service.call("ListImages").count('"image-') == 1
    service.engine.unreadable.clear()
    wait_for(service, service.start("Checkpoint", "ua{sv}", os.getpid(), 0), "done")
    wait_until(lambda: troubles(service) == "0", "its end")
