"""A file that is to be imported is looked at before phosd is asked."""

import io

import pytest

from phosd.client.transfer import head_of
from phosd.errors import ImageCorrupt


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"junk", "is not the image of a phosd"),
        (b"x" * 100, "is not the image of a phosd"),
        (b"PHOS", "ends in the middle"),
    ],
)
def test_a_file_that_is_no_image(content: bytes, why: str) -> None:
    with pytest.raises(ImageCorrupt, match=why):
        head_of(io.BytesIO(content), "bert.phos")
