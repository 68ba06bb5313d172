//! The launches of the stand-in for NCCL, and the failures that tests ask it for.

use std::ffi::{CString, c_char, c_int};

use libloading::{Library, Symbol};

/// The library of the stand-in.
pub(crate) struct StandIn(Library);

impl StandIn {
    /// Opens it, if it is in the place of the driver.
    pub(crate) fn open() -> Option<Self> {
        // SAFETY: the driver's library may be loaded by any program.
        let library = unsafe { Library::new("libcuda.so.1") }.ok()?;
        // SAFETY: the symbol is only looked for.
        let is_stand_in = unsafe { library.get::<*const ()>(b"stand_in_launches\0") }.is_ok();
        is_stand_in.then_some(Self(library))
    }

    /// Returns the communicators of the operations launched on a device, in order.
    pub(crate) fn launches(&self, device: usize) -> Vec<u64> {
        // SAFETY: it has this type.
        let launches: Symbol<unsafe extern "C" fn(c_int, *mut u64, usize) -> usize> =
            unsafe { self.0.get(b"stand_in_launches\0") }.unwrap();
        let mut numbers = vec![0; 1 << 12];
        // SAFETY: it writes no more numbers than it is told.
        let n = unsafe { launches(device as c_int, numbers.as_mut_ptr(), numbers.len()) };
        assert!(n <= numbers.len(), "{n} launches: more than this test reads");
        numbers.truncate(n);
        numbers
    }

    /// Lets the next call of an NCCL function fail, whoever makes it.
    pub(crate) fn fail_next(&self, function: &str) {
        // SAFETY: it has this type.
        let fail_next: Symbol<unsafe extern "C" fn(*const c_char)> =
            unsafe { self.0.get(b"stand_in_fail_next\0") }.unwrap();
        let function = CString::new(function).unwrap();
        // SAFETY: it copies a text that ends with a zero.
        unsafe { fail_next(function.as_ptr()) };
    }
}
