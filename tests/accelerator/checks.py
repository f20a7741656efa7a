"""All checks by name, in the order in which `make accelerator` runs them.

A check raises if something is wrong, and `on_device.NotShown` if the device cannot show it. It
returns what it has seen, in a few words.
"""

from collections.abc import Callable

from tests.accelerator import arrays, core, resources

# The one of peaks is first: it sees only a peak that is the highest of the process.
CHECKS: dict[str, Callable[[], str]] = {
    "donation: peak memory": resources.check_peak_memory,
    "donation: arguments": resources.check_donation,
    "donation: results that are views": resources.check_donated_views,
    "compiles are buckets": arrays.check_compiles,
    "transfers: the guard": arrays.check_guard,
    "transfers: warm calls": arrays.check_transfers,
    "transfers: new sizes": arrays.check_new_sizes,
    "transfers: padded results": arrays.check_padded,
    "memory by max_bytes": resources.check_max_bytes,
    "background compiles": resources.check_background,
    "an encoder": core.check_encoder,
    "a CNN, trained": core.check_cnn,
    **{f"core: {family}": run for family, run in core.families()},
}
