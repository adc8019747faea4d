"""Where the caches of a test are: the fixture ``everywhere`` sets it, and what makes and reads them goes by it."""

import numpy as np

from lkv import KvCache, KvLayer, LatentKvCache, Storage, View
from lkv.devices import DeviceLocation

from .cuda import device_bytes, on_host

_current = ["cpu"]


def place():
    """Return the location, as a string."""
    return _current[0]


def set_place(location):
    """Have everything made from now on at a location."""
    _current[0] = location


def location():
    return DeviceLocation.parse(place())


def latent_cache(*args, **more):
    """Make a LatentKvCache by `with_capacity`, here."""
    return LatentKvCache.with_capacity(*args, **more, device=place())


def kv_cache(*args, **more):
    """Make a KvCache by `with_capacity`, here."""
    return KvCache.with_capacity(*args, **more, device=place())


def kv_layer(*args):
    """Make a KvLayer by `allocate`, here."""
    return KvLayer.allocate(*args, place())


def new_storage(*args, **more):
    """Make a Storage here."""
    return Storage(*args, **more, device=place())


def look(view):
    """Return the elements of a view or an array: where the host reaches them in place, else as a copy."""
    if not isinstance(view, View):
        return np.asarray(view)
    if view.host_accessible:
        return view.numpy()
    if not view.shape:  # there are no storages of no dims to copy it to
        return np.frombuffer(device_bytes(view.address, view.nbytes), view.dtype.numpy).reshape(())
    return on_host(view).copy()


def anchor():
    """Return what a functional cache is made after, here: an array of the host, or a storage of the device."""
    return np.empty(0) if place() == "cpu" else Storage(1, "u8", place())


def address_of(view):
    return view.ctypes.data if isinstance(view, np.ndarray) else view.address


def refused_for_gaps(arrays, row):
    """Whether a cache here refuses these arrays: a device takes no gaps inside a row, the host does.

    `row` is the index of one row that must be in one run.
    """
    given = [np.asarray(a) for a in arrays if isinstance(a, np.ndarray) or hasattr(a, "data_ptr")]
    return place() != "cpu" and not all(a[row].flags.c_contiguous for a in given)


def arrays_of(rows):
    """Return the arrays of all slots: where the host reaches them in place, else as copies."""
    if place() == "cpu" and not isinstance(rows, tuple | list):
        return rows.numpy()
    return [look(view) for view in rows]


def put_in(view, array):
    """Write an array into a view, which may be on a device."""
    if view.host_accessible:
        view.numpy()[...] = array
        return
    source = Storage(view.shape, view.dtype).alias()
    source.numpy()[...] = array
    view.copy_from(source)


def all_readonly(rows):
    """Whether no slot of a lease can be written, also by way of its arrays."""
    return all(view.readonly for view in rows) and (
        place() != "cpu" or not any(array.flags.writeable for array in rows.numpy())
    )
