//! Access to the stand-in for NCCL: recorded launches and injected failures.

use std::ffi::{CString, c_char, c_int};

use libloading::{Library, Symbol};

/// Library of the stand-in.
pub(crate) struct StandIn(Library);

impl StandIn {
    /// Opens the stand-in, if it replaces the CUDA driver.
    pub(crate) fn open() -> Option<Self> {
        // SAFETY: the initializers of the driver's library have no preconditions.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the symbol is only looked up.
        let is_stand_in = unsafe { library.get::<*const ()>(b"stand_in_launches\0") }.is_ok();
        is_stand_in.then_some(Self(library))
    }

    /// Returns the communicators of the operations launched on a device, in order.
    pub(crate) fn launches(&self, device: usize) -> Vec<u64> {
        // SAFETY: the function has this type.
        let launches: Symbol<unsafe extern "C" fn(c_int, *mut u64, usize) -> usize> =
            unsafe { self.0.get(b"stand_in_launches\0") }.unwrap();
        let mut numbers = vec![0; 1 << 12];
        // SAFETY: the function writes at most `len` numbers.
        let n = unsafe { launches(device as c_int, numbers.as_mut_ptr(), numbers.len()) };
        assert!(n <= numbers.len(), "{n} launches: more than the buffer holds");
        numbers.truncate(n);
        numbers
    }

    /// Makes the next call of an NCCL function fail, on any thread.
    pub(crate) fn fail_next(&self, function: &str) {
        // SAFETY: the function has this type.
        let fail_next: Symbol<unsafe extern "C" fn(*const c_char)> =
            unsafe { self.0.get(b"stand_in_fail_next\0") }.unwrap();
        let function = CString::new(function).unwrap();
        // SAFETY: the function copies a null-terminated string.
        unsafe { fail_next(function.as_ptr()) };
    }
}
