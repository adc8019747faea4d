//! A Rust runtime without crates that decodes into a cache. Run: python examples/embed_rust/run.py
//!
//! It gets the address of the table from its host, and storages by their handles. Neither needs Python's C interface.
use std::ffi::c_void;
use std::ptr::null_mut;

const WRITE: i32 = 1;
const FOREVER: i64 = -1;
type Unused = usize; // a member that is not called here

/// The beginning of lkv_api, up to the last member that is used.
#[repr(C)]
pub struct Api {
    abi_major: u32,
    abi_minor: u32,
    struct_size: usize,
    errors_devices_buffers: [Unused; 8],
    buffer_retain: unsafe extern "C" fn(*mut c_void),
    buffer_release: unsafe extern "C" fn(*mut c_void),
    buffer_info_bump_version: [Unused; 2],
    lease_acquire: unsafe extern "C" fn(*mut c_void, i32, i64, i64, i64, *mut *mut c_void) -> i32,
    lease_retain: Unused,
    lease_release: unsafe extern "C" fn(*mut c_void),
    lease_end_poison_downgrade_data_clear: [Unused; 5],
    copies_fill_zero_read_host: [Unused; 4],
    write_host: unsafe extern "C" fn(*mut c_void, usize, *const c_void, usize) -> i32,
}

/// One layer's storage. Dropping it drops the reference, in whatever thread.
struct Slot(&'static Api, *mut c_void);
unsafe impl Send for Slot {}

impl Slot {
    fn write(&self, row: i64, values: &[f32]) -> i32 {
        let mut lease = null_mut();
        unsafe {
            let status = (self.0.lease_acquire)(self.1, WRITE, row, row + 1, FOREVER, &mut lease);
            if status != 0 {
                return status;
            }
            let status = (self.0.write_host)(lease, 0, values.as_ptr().cast(), size_of_val(values));
            (self.0.lease_release)(lease);
            status
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        unsafe { (self.0.buffer_release)(self.1) }
    }
}

/// Writes token `row` of every layer, a thread each. Returns an lkv_status.
#[no_mangle]
pub unsafe extern "C" fn decode(table: usize, handles: *const usize, layers: usize, row: i64) -> i32 {
    let api = &*(table as *const Api);
    if api.abi_major != 1 || api.struct_size < size_of::<Api>() {
        return 15; // LKV_E_ABI
    }
    let threads: Vec<_> = std::slice::from_raw_parts(handles, layers)
        .iter()
        .map(|&handle| {
            (api.buffer_retain)(handle as *mut c_void);
            let slot = Slot(api, handle as *mut c_void);
            std::thread::spawn(move || { let slot = slot; slot.write(row, &[row as f32; 4]) })
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap_or(1)).max().unwrap_or(0)
}
