//! A cdylib without crates: the host gives it the table's address, and it uses storages that Python made.
use std::ffi::{c_char, c_void, CStr};
use std::ptr::null_mut;
use std::slice::from_raw_parts_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

const ABI_MAJOR: u32 = 1;
const WRITE: i32 = 1;
const FOREVER: i64 = -1;

#[repr(C)]
struct Span {
    struct_size: usize,
    data: *mut c_void,
    nbytes: usize,
    lo: i64,
    hi: i64,
    mode: i32,
    reserved: i32,
}

#[repr(C)]
struct Info {
    struct_size: usize,
    id: u64,
    device: *mut c_void,
    dl_device_type: i32,
    ordinal: i32,
    data: *mut c_void,
    nbytes: usize,
    rows: i64,
    row_bytes: i64,
    claimed: i64,
    version: u64,
    refcount: u64,
    dtype: i32,
    poisoned: i32,
    read_only: i32,
    reserved: i32,
}

type Entry = unsafe extern "C" fn();

/// The beginning of lkv_api. Members that are not used here are only counted.
#[repr(C)]
struct Api {
    abi_major: u32,
    abi_minor: u32,
    struct_size: usize,
    status_name: unsafe extern "C" fn(i32) -> *const c_char,
    last_error: unsafe extern "C" fn() -> *const c_char,
    set_error: Entry,
    devices: [Entry; 3],
    buffer_create: Entry,
    buffer_wrap: Entry,
    buffer_retain: unsafe extern "C" fn(*mut c_void),
    buffer_release: unsafe extern "C" fn(*mut c_void),
    buffer_info: unsafe extern "C" fn(*const c_void, *mut Info) -> i32,
    buffer_bump_version: Entry,
    lease_acquire: unsafe extern "C" fn(*mut c_void, i32, i64, i64, i64, *mut *mut c_void) -> i32,
    lease_retain: Entry,
    lease_release: unsafe extern "C" fn(*mut c_void),
    lease_end: Entry,
    lease_release_poisoned: Entry,
    lease_downgrade: Entry,
    lease_data: unsafe extern "C" fn(*const c_void, *mut Span) -> i32,
}

static TABLE: AtomicPtr<Api> = AtomicPtr::new(null_mut());

fn api() -> &'static Api {
    unsafe { &*TABLE.load(Ordering::Acquire) }
}

/// Takes the table's address; 0, or 15 (LKV_E_ABI) when the library is not one this was compiled for.
#[no_mangle]
pub extern "C" fn attach(address: usize, minor: u32) -> i32 {
    let table = address as *mut Api;
    let found = unsafe { &*table };
    if found.abi_major != ABI_MAJOR || found.abi_minor < minor || found.struct_size < size_of::<Api>() {
        return 15;
    }
    TABLE.store(table, Ordering::Release);
    0
}

/// A reference to a storage that is dropped with its owner, in whatever thread.
struct Buffer(*mut c_void);
unsafe impl Send for Buffer {}

impl Buffer {
    fn share(handle: usize) -> Self {
        unsafe { (api().buffer_retain)(handle as *mut c_void) };
        Buffer(handle as *mut c_void)
    }

    fn rows(&self) -> Result<i64, i32> {
        let mut info: Info = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<Info>();
        match unsafe { (api().buffer_info)(self.0, &mut info) } {
            0 => Ok(info.rows),
            status => Err(status),
        }
    }

    /// Runs `body` over the bytes of rows under a write lease.
    fn write(&self, lo: i64, hi: i64, timeout: i64, body: impl FnOnce(&mut [u8])) -> Result<(), i32> {
        let mut lease = null_mut();
        let status = unsafe { (api().lease_acquire)(self.0, WRITE, lo, hi, timeout, &mut lease) };
        if status != 0 {
            return Err(status);
        }
        let mut span: Span = unsafe { std::mem::zeroed() };
        span.struct_size = size_of::<Span>();
        let status = unsafe { (api().lease_data)(lease, &mut span) };
        if status == 0 {
            body(unsafe { from_raw_parts_mut(span.data as *mut u8, span.nbytes) });
        }
        unsafe { (api().lease_release)(lease) };
        if status == 0 { Ok(()) } else { Err(status) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        unsafe { (api().buffer_release)(self.0) };
    }
}

/// A thread per row writes its number to it. The caller may hold the GIL.
#[no_mangle]
pub extern "C" fn number_rows(handle: usize) -> i32 {
    let rows = match Buffer::share(handle).rows() {
        Ok(rows) => rows,
        Err(status) => return status,
    };
    let threads: Vec<_> = (0..rows)
        .map(|row| {
            let buffer = Buffer::share(handle);
            std::thread::spawn(move || {
                let whole = buffer; // all of it moves here, not only the pointer
                whole.write(row, row + 1, FOREVER, |bytes| bytes.fill(row as u8))
            })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap().err().unwrap_or(0)).max().unwrap_or(0)
}

/// Tries to write rows that there may not be, or that somebody has.
#[no_mangle]
pub extern "C" fn try_rows(handle: usize, lo: i64, hi: i64) -> i32 {
    Buffer::share(handle).write(lo, hi, 0, |_| ()).err().unwrap_or(0)
}

/// "LKV_E_INVALID: ..." into the caller's text.
#[no_mangle]
pub unsafe extern "C" fn explain(status: i32, text: *mut c_char, size: usize) {
    let name = CStr::from_ptr((api().status_name)(status)).to_string_lossy();
    let message = CStr::from_ptr((api().last_error)()).to_string_lossy();
    let whole = format!("{name}: {message}");
    let count = whole.len().min(size - 1);
    std::ptr::copy_nonoverlapping(whole.as_ptr() as *const c_char, text, count);
    *text.add(count) = 0;
}
