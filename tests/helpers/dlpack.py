"""The DLPack structs, by ctypes: what a consumer in C sees."""

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)

READ_ONLY, IS_COPIED = 1, 2


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class Legacy(Structure):
    pass


class Versioned(Structure):
    pass


LEGACY_DELETER = CFUNCTYPE(None, POINTER(Legacy))
VERSIONED_DELETER = CFUNCTYPE(None, POINTER(Versioned))
Legacy._fields_ = [("tensor", DLTensor), ("context", c_void_p), ("deleter", LEGACY_DELETER)]
Versioned._fields_ = [
    ("major", c_uint32),
    ("minor", c_uint32),
    ("context", c_void_p),
    ("deleter", VERSIONED_DELETER),
    ("flags", c_uint64),
    ("tensor", DLTensor),
]

SET_ERROR = CFUNCTYPE(None, c_void_p, c_char_p, c_char_p)


class ExchangeAPI(Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("previous", c_void_p),
        ("allocate", ctypes.PYFUNCTYPE(c_int, POINTER(DLTensor), POINTER(POINTER(Versioned)), c_void_p, SET_ERROR)),
        ("from_object", ctypes.PYFUNCTYPE(c_int, ctypes.py_object, POINTER(POINTER(Versioned)))),
        ("to_object", ctypes.PYFUNCTYPE(c_int, POINTER(Versioned), POINTER(c_void_p))),
        ("borrow", ctypes.PYFUNCTYPE(c_int, ctypes.py_object, POINTER(DLTensor))),
        ("stream", ctypes.PYFUNCTYPE(c_int, c_int32, c_int32, POINTER(c_void_p))),
    ]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_name = ctypes.pythonapi.PyCapsule_GetName
_name.restype, _name.argtypes = c_char_p, [ctypes.py_object]
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]


def capsule_name(capsule):
    return _name(capsule).decode()


def versioned(capsule):
    """The struct in a versioned capsule; borrowed."""
    return ctypes.cast(_pointer(capsule, b"dltensor_versioned"), POINTER(Versioned)).contents


def legacy(capsule):
    """The struct in a capsule from before DLPack 1.0; borrowed."""
    return ctypes.cast(_pointer(capsule, b"dltensor"), POINTER(Legacy)).contents


def exchange(kind):
    """The exchange table of a type of arrays."""
    return ctypes.cast(_pointer(kind.__dlpack_c_exchange_api__, b"dlpack_exchange_api"), POINTER(ExchangeAPI)).contents


def dims(tensor):
    """Shape and strides of a DLTensor."""
    assert tensor.strides, "the strides are not set"
    return tuple(tensor.shape[: tensor.ndim]), tuple(tensor.strides[: tensor.ndim])


class Producer:
    """An array with nothing but `__dlpack__`, over a NumPy array; counts the calls and those of its deleter."""

    def __init__(self, array, *, versioned=True, flags=0, major=1, code=None, bits=None, lanes=1, null=False, device=1):
        kinds = {"f": 2, "i": 0, "u": 1, "b": 6}
        self.array, self.versioned = array, versioned
        self.asked = self.deleted = 0
        self.shape, self.dtype = array.shape, array.dtype
        self._shape = (c_int64 * max(array.ndim, 1))(*array.shape)
        self._strides = (c_int64 * max(array.ndim, 1))(*(step // array.itemsize for step in array.strides))
        self._deleter = (VERSIONED_DELETER if versioned else LEGACY_DELETER)(self._delete)
        tensor = DLTensor(
            None if null else array.ctypes.data,
            device,
            0,
            array.ndim,
            kinds.get(array.dtype.kind, 255) if code is None else code,
            array.itemsize * 8 if bits is None else bits,
            lanes,
            self._shape,
            self._strides,
            0,
        )
        self.managed = (
            Versioned(major, 0, None, self._deleter, flags, tensor)
            if versioned
            else Legacy(tensor, None, self._deleter)
        )

    def _delete(self, _):
        self.deleted += 1

    def __dlpack_device__(self):
        return self.managed.tensor.device_type, 0

    def __dlpack__(self, *, stream=None, **options):
        if not self.versioned and options:
            raise TypeError(f"__dlpack__() got unexpected keyword arguments {list(options)}")
        self.asked += 1
        name = b"dltensor_versioned" if self.versioned else b"dltensor"
        return _new(ctypes.addressof(self.managed), name, None)


class Odd:
    """An object whose `__dlpack__` does what it was told."""

    def __init__(self, action):
        self.action = action

    def __dlpack__(self, **_):
        return self.action()
