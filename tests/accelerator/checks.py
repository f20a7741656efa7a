"""The list of all checks, in the order in which `make accelerator` runs them."""

from collections.abc import Callable
from typing import NamedTuple

from tests.accelerator import arrays, core, resources


class Check(NamedTuple):
    """A check.

    Attributes:
        name: What its line is called.
        run: Raises if something is wrong, `on_device.NotShown` if the device cannot show it;
            returns what it has seen, in a few words.
    """

    name: str
    run: Callable[[], str]


# The one of peaks is first: it sees only a peak that is the highest of the process.
CHECKS = (
    Check("donation: peak memory", resources.check_peak_memory),
    Check("donation: arguments", resources.check_donation),
    Check("donation: results that are views", resources.check_donated_views),
    Check("compiles are buckets", arrays.check_compiles),
    Check("transfers: the guard", arrays.check_guard),
    Check("transfers: warm calls", arrays.check_transfers),
    Check("transfers: new sizes", arrays.check_new_sizes),
    Check("transfers: padded results", arrays.check_padded),
    Check("memory by max_bytes", resources.check_max_bytes),
    Check("background compiles", resources.check_background),
    Check("an encoder", core.check_encoder),
    Check("a CNN, trained", core.check_cnn),
    *(Check(f"core: {family}", run) for family, run in core.families()),
)
