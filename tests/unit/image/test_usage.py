"""What is remembered of images, and for how long."""

import gc

from phosd.engine.image import usage
from tests.support.fake_engine import manifest


def test_what_is_remembered_of_an_image_goes_with_its_manifest() -> None:
    """phosd makes one for each suspension, of a program whose chunks are many."""
    first = manifest("remembered")
    found = usage.pack_bytes(first)
    assert usage.pack_bytes(first) is found and "remembered" in usage._known
    second = manifest("remembered")
    usage.pack_bytes(second)
    del first
    gc.collect()
    assert "remembered" in usage._known, "another one of the image is there"
    del second
    gc.collect()
    assert "remembered" not in usage._known
