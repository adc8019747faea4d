"""A stand-in for PyTorch with CUDA: a library whose current stream is its own; DLPack's exchange table tells of it."""

import ctypes

from helpers.dlpack import DLTensor, ExchangeAPI, _new

NAME = b"dlpack_exchange_api"  # the capsule keeps the pointer only
KINDS = {"f": 2, "i": 0, "u": 1, "b": 6}
FIELDS = {name: kind for name, kind in ExchangeAPI._fields_}


class LibraryArray:
    """A CuPy array that has nothing of CuPy's protocols."""

    stream = 0  # the library's current one

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * array.ndim)(*(step // array.itemsize for step in array.strides))

    def describe(self, out):
        out[0] = DLTensor(
            self.array.data.ptr,
            2,
            self.array.device.id,
            self.array.ndim,
            KINDS[self.array.dtype.kind],
            self.array.itemsize * 8,
            1,
            self._shape,
            self._strides,
            0,
        )
        return 0


def _work_stream(device_type, device_id, out):
    out[0] = LibraryArray.stream
    return 0


_table = ExchangeAPI(1, 3, None, borrow=FIELDS["borrow"](LibraryArray.describe), stream=FIELDS["stream"](_work_stream))
LibraryArray.__dlpack_c_exchange_api__ = _new(ctypes.addressof(_table), NAME, None)
