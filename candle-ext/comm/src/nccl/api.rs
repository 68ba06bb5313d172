//! Bindings of NCCL, loaded at run time on first use.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::LazyLock;

use candle_core::DType;
use libloading::Library;

/// First version with nonblocking communicators.
const MIN_VERSION: c_int = 2_14_00;

const FILES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

pub(super) const SUCCESS: c_int = 0;
pub(super) const IN_PROGRESS: c_int = 7;

/// `ncclComm_t`.
pub(super) type CommHandle = *mut c_void;

/// `cudaStream_t`.
pub(super) type StreamHandle = *mut c_void;

/// `ncclUniqueId`, the id of a new communicator.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; 128]);

/// `ncclConfig_t` of NCCL 2.14. Newer libraries read `version` and use their defaults for later fields.
#[repr(C)]
pub(super) struct NcclConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    padding: c_int,
}

impl NcclConfig {
    /// Returns the configuration of a nonblocking communicator.
    pub(super) fn non_blocking() -> Self {
        let version = MIN_VERSION as c_uint;
        Self { size: size_of::<Self>(), magic: 0xCAFE_BEEF, version, blocking: 0, padding: 0 }
    }
}

/// Declares the functions of nccl.h in use.
macro_rules! functions {
    ($($field:ident: $name:literal fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of nccl.h.
        pub(super) struct Nccl {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Library that holds the functions.
            _library: Library,
        }

        impl Nccl {
            fn find(library: Library) -> Result<Self, libloading::Error> {
                // SAFETY: nccl.h declares the functions with these types since 2.14.
                unsafe { Ok(Self { $($field: *library.get($name)?,)* _library: library }) }
            }
        }
    };
}

functions! {
    get_version: b"ncclGetVersion\0" fn(*mut c_int) -> c_int;
    get_unique_id: b"ncclGetUniqueId\0" fn(*mut UniqueId) -> c_int;
    get_error_string: b"ncclGetErrorString\0" fn(c_int) -> *const c_char;
    get_last_error: b"ncclGetLastError\0" fn(CommHandle) -> *const c_char;
    comm_init_rank_config: b"ncclCommInitRankConfig\0" fn(*mut CommHandle, c_int, UniqueId, c_int, *mut NcclConfig) -> c_int;
    comm_get_async_error: b"ncclCommGetAsyncError\0" fn(CommHandle, *mut c_int) -> c_int;
    comm_finalize: b"ncclCommFinalize\0" fn(CommHandle) -> c_int;
    comm_destroy: b"ncclCommDestroy\0" fn(CommHandle) -> c_int;
    comm_abort: b"ncclCommAbort\0" fn(CommHandle) -> c_int;
    group_start: b"ncclGroupStart\0" fn() -> c_int;
    group_end: b"ncclGroupEnd\0" fn() -> c_int;
    all_reduce: b"ncclAllReduce\0" fn(*const c_void, *mut c_void, usize, c_int, c_int, CommHandle, StreamHandle) -> c_int;
    all_gather: b"ncclAllGather\0" fn(*const c_void, *mut c_void, usize, c_int, CommHandle, StreamHandle) -> c_int;
    reduce_scatter:
        b"ncclReduceScatter\0" fn(*const c_void, *mut c_void, usize, c_int, c_int, CommHandle, StreamHandle) -> c_int;
    broadcast: b"ncclBroadcast\0" fn(*const c_void, *mut c_void, usize, c_int, c_int, CommHandle, StreamHandle) -> c_int;
    send: b"ncclSend\0" fn(*const c_void, usize, c_int, c_int, CommHandle, StreamHandle) -> c_int;
    receive: b"ncclRecv\0" fn(*mut c_void, usize, c_int, c_int, CommHandle, StreamHandle) -> c_int;
}

static NCCL: LazyLock<Result<Nccl, String>> = LazyLock::new(load);

/// Returns NCCL, or the reason why it is unavailable.
pub(super) fn nccl() -> Result<&'static Nccl, String> {
    NCCL.as_ref().map_err(Clone::clone)
}

fn load() -> Result<Nccl, String> {
    // SAFETY: the initializers of NVIDIA's libraries have no preconditions.
    let library = FILES.iter().find_map(|file| unsafe { Library::new(*file) }.ok());
    let library = library
        .ok_or_else(|| format!("NCCL cannot be loaded ({}); add its folder to LD_LIBRARY_PATH", FILES.join(" or ")))?;
    let nccl = Nccl::find(library).map_err(|error| format!("NCCL is older than 2.14: {error}"))?;
    let mut version = 0;
    // SAFETY: the function writes one int.
    unsafe { (nccl.get_version)(&raw mut version) };
    match version {
        ..MIN_VERSION => Err(format!("NCCL is older than 2.14 (version {version})")),
        _ => Ok(nccl),
    }
}

impl Nccl {
    /// Returns the message of a result, with NCCL's last error.
    pub(super) fn explain(&self, result: c_int, handle: CommHandle) -> String {
        // SAFETY: both return static strings, which are copied before the next call.
        let [what, detail] = unsafe { [(self.get_error_string)(result), (self.get_last_error)(handle)] }.map(text);
        if detail.is_empty() { format!("NCCL: {what}") } else { format!("NCCL: {what} ({detail})") }
    }
}

fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the pointer is not null, and NCCL's strings are null-terminated.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
}

/// Returns the `ncclDataType_t` of a supported dtype.
pub(super) fn number_of(dtype: DType) -> Option<c_int> {
    Some(match dtype {
        DType::U8 => 1,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::BF16 => 9,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DTYPES;

    #[test]
    fn every_supported_dtype_has_an_nccl_type() {
        let numbers: Vec<_> = DTYPES.iter().filter_map(|dtype| number_of(*dtype)).collect();
        assert_eq!(numbers.len(), DTYPES.len());
        assert_eq!(number_of(DType::F8E4M3), None);
    }

    #[test]
    fn the_config_has_the_layout_of_2_14() {
        assert_eq!((size_of::<NcclConfig>(), std::mem::offset_of!(NcclConfig, blocking)), (24, 16));
        assert_eq!(size_of::<UniqueId>(), 128);
    }
}
