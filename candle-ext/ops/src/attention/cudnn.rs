//! Attention by cuDNN, through `cudnn.cpp`. A graph is built once for each [`Shape`] and runs on candle's stream.
//!
//! cuDNN is loaded on first use. If it is missing or does not support a call, [`plan`] returns the reason.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::driver::{DevicePtr, sys::CUdevice_attribute};
use candle_core::{CudaDevice, DType, Device, Error, Result, Tensor};

use super::cu_seqlens::CuSeqlens;
use super::cuda::{BackwardInputs, aligned};
use super::cudnn_faults::{dotted, fault};
use super::graphs::Graphs;
use super::layout::HeadCounts;
use super::ragged::{Bucket, Tables};
use super::spec::{AttentionPasses, AttentionSpec};
use crate::cuda::{DeviceAddress, Out, address, gpu};
use crate::nvidia;
use crate::transfer::upload_table;

const OP: &str = "attention by cuDNN";
/// Oldest supported cuDNN, 9.10.2. The backward of 9.10.0 and 9.10.1 is wrong. Older releases lack windows over packed
/// sequences or 64-bit offsets.
const MIN_VERSION: usize = 9_10_02;
/// Size of the error message buffer in bytes.
const MESSAGE: usize = 4096;

type Explained<T> = std::result::Result<T, String>;

/// Key of a cuDNN graph. Same layout as in cudnn.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    batch: i64,
    max_q: i64,
    max_k: i64,
    total_q: i64,
    total_k: i64,
    heads_q: i64,
    heads_k: i64,
    dim: i64,
    window: i64,
    scale_bits: u32,
    is_causal: i32,
    ends_together: i32,
    is_bf16: i32,
    capability: i32,
    is_backward: i32,
    is_deterministic: i32,
}

/// Device addresses; zero if a graph does not use one. Same layout as in cudnn.cpp.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct Addresses {
    q: DeviceAddress,
    k: DeviceAddress,
    v: DeviceAddress,
    o: DeviceAddress,
    stats: DeviceAddress,
    d_o: DeviceAddress,
    dq: DeviceAddress,
    dk: DeviceAddress,
    dv: DeviceAddress,
    lens_q: DeviceAddress,
    lens_k: DeviceAddress,
    offsets_q: DeviceAddress,
    offsets_k: DeviceAddress,
    offsets_stats: DeviceAddress,
    workspace: DeviceAddress,
}

unsafe extern "C" {
    fn candlewick_cudnn_open(library: *mut c_void, version: *mut usize, error: *mut c_char, size: usize) -> c_int;
    fn candlewick_cudnn_handle(handle: *mut *mut c_void, error: *mut c_char, size: usize) -> c_int;
    fn candlewick_cudnn_build(
        handle: *mut c_void,
        shape: *const Shape,
        graph: *mut *mut c_void,
        workspace: *mut i64,
        error: *mut c_char,
        size: usize,
    ) -> c_int;
    fn candlewick_cudnn_run(
        handle: *mut c_void,
        graph: *const c_void,
        is_backward: i32,
        stream: *mut c_void,
        addresses: *const Addresses,
        error: *mut c_char,
        size: usize,
    ) -> c_int;
}

/// Version of the loaded library, such as 91900.
static VERSION: LazyLock<Explained<usize>> = LazyLock::new(open);

static DEVICES: LazyLock<Mutex<HashMap<DeviceId, Cudnn>>> = LazyLock::new(Mutex::default);

/// cuDNN on one device.
struct Cudnn {
    handle: Pointer,
    capability: i32,
    graphs: Graphs<Shape, Graph>,
}

/// Handle or graph of cuDNN, which lives as long as the process.
#[derive(Clone, Copy)]
struct Pointer(*mut c_void);

// SAFETY: handles and graphs may be used from any thread, by one at a time: all use is under the lock of `DEVICES`.
unsafe impl Send for Pointer {}
// SAFETY: as above.
unsafe impl Sync for Pointer {}

#[derive(Clone, Copy)]
struct Graph {
    shape: Shape,
    pointer: Pointer,
    workspace_bytes: usize,
}

/// Graphs that compute a call.
pub(super) struct CudnnPlan {
    bucket: Bucket,
    forward: Graph,
    backward: Option<Graph>,
    is_deterministic: bool,
}

/// Statistics of a forward that backward needs besides inputs and output.
pub(super) struct CudnnForwardState {
    plan: Box<CudnnPlan>,
    /// Log-sum-exp of each row, f32 [t, hq].
    stats: Tensor,
    tables: DeviceTables,
    /// True if some keys are masked for all queries: cuDNN does not write their gradients.
    has_unseen_keys: bool,
}

/// [`Tables`] uploaded to the device.
struct DeviceTables {
    lens: Tensor,
    offsets: Tensor,
    batch: usize,
    width: usize,
}

/// Finds or builds the graphs of a call. The error is the reason why cuDNN does not support it.
pub(super) fn plan(
    q: &Tensor,
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
    passes: AttentionPasses,
) -> Explained<CudnnPlan> {
    let Device::Cuda(device) = q.device() else { return Err("it computes on GPUs only, and this is the CPU".into()) };
    let is_bf16 = match q.dtype() {
        DType::BF16 => true,
        DType::F16 => false,
        other => return Err(format!("it computes in bf16 and f16, not {other:?}")),
    };
    if !heads.dim.is_multiple_of(16) {
        // The backward needs memory linear in the tokens only under this condition.
        return Err(format!("it needs a head dim that is a multiple of 16, not {}", heads.dim));
    }
    if seqs.n_tokens() == 0 {
        return Err("there are no tokens".into());
    }
    let bucket = Bucket::of(seqs);
    let version = (*VERSION).clone()?;
    if version < MIN_VERSION {
        return Err(format!("it is {}, and must be {} at least", dotted(version), dotted(MIN_VERSION)));
    }
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let cudnn = match devices.entry(device.id()) {
        std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
        std::collections::hash_map::Entry::Vacant(entry) => entry.insert(Cudnn::new(device)?),
    };
    if !(90..110).contains(&cudnn.capability) {
        // On older GPUs the backward does not accept packed statistics.
        return Err(format!("it needs Hopper or Blackwell for packed sequences, not sm_{}", cudnn.capability));
    }
    let forward = shape(cudnn.capability, &bucket, is_bf16, seqs, spec, heads);
    let is_deterministic = spec.choice.deterministic;
    let backward = Shape {
        is_backward: 1,
        is_deterministic: i32::from(is_deterministic),
        total_q: bucket.total_q as i64,
        total_k: bucket.total_k as i64,
        ..forward
    };
    let forward = cudnn.graph(device, forward)?;
    let backward = if passes == AttentionPasses::Both { Some(cudnn.graph(device, backward)?) } else { None };
    Ok(CudnnPlan { bucket, forward, backward, is_deterministic })
}

/// Returns the key of the forward graph. It does not depend on the number of tokens.
fn shape(
    capability: i32,
    bucket: &Bucket,
    is_bf16: bool,
    seqs: &CuSeqlens,
    spec: &AttentionSpec,
    heads: HeadCounts,
) -> Shape {
    // A window that covers every key equals no window.
    let longest = seqs.spans().map(|span| span.k.len()).max().unwrap_or(0);
    let window = spec.window.filter(|&window| window < longest).unwrap_or(0);
    Shape {
        batch: bucket.batch as i64,
        max_q: bucket.max_q as i64,
        max_k: bucket.max_k as i64,
        total_q: 0,
        total_k: 0,
        heads_q: (heads.n_kv * heads.group) as i64,
        heads_k: heads.n_kv as i64,
        dim: heads.dim as i64,
        window: window as i64,
        scale_bits: spec.scale.to_bits(),
        is_causal: i32::from(spec.causal),
        ends_together: i32::from((spec.causal || window > 0) && seqs.cu_seqlens_q() != seqs.cu_seqlens_k()),
        is_bf16: i32::from(is_bf16),
        capability,
        is_backward: 0,
        is_deterministic: 0,
    }
}

impl CudnnPlan {
    /// Describes the library: its version and whether it is deterministic.
    pub(super) fn describe(&self) -> String {
        let version = VERSION.as_ref().map_or("?".into(), |version| dotted(*version));
        format!("cuDNN {version}{}", if self.is_deterministic { ", deterministic" } else { "" })
    }
}

/// Returns o, or the reason why cuDNN refused the call.
pub(super) fn forward(
    plan: Box<CudnnPlan>,
    qkv: [&Tensor; 3],
    seqs: &CuSeqlens,
    heads: HeadCounts,
) -> Result<Explained<(Out, CudnnForwardState)>> {
    let [q, k, v] = qkv.map(aligned);
    let (q, k, v) = (q?, k?, v?);
    let on = gpu(OP, &q)?;
    let n_rows = q.elem_count() / heads.dim;
    let (o, stats) = (Out::new(on, q.dtype(), q.elem_count())?, Out::new(on, DType::F32, n_rows)?);
    let tables = DeviceTables::new(seqs, heads, plan.bucket.batch, q.device())?;
    let addresses = Addresses {
        q: address(OP, &q)?,
        k: address(OP, &k)?,
        v: address(OP, &v)?,
        o: o.address,
        stats: stats.address,
        ..tables.addresses()?
    };
    // SAFETY: q and o are [t, hq, k], k and v [s, hkv, k], the statistics [t, hq], as the tables say; the sequences fit
    // into the bucket that the graph was built for.
    let ran = unsafe { run(q.device(), plan.forward, 0, addresses)? };
    let has_unseen_keys = seqs.cu_seqlens_q() != seqs.cu_seqlens_k();
    Ok(ran.map(|()| (o, CudnnForwardState { plan, stats: stats.into_tensor(n_rows), tables, has_unseen_keys })))
}

/// Returns dq, dk and dv, or the reason why cuDNN refused the call.
pub(super) fn backward(inputs: &BackwardInputs<'_>, state: &CudnnForwardState) -> Result<Explained<[Tensor; 3]>> {
    let BackwardInputs { q, k, v, o, d_o } = *inputs;
    let (q, k, v, d_o) = (&aligned(q)?, &aligned(k)?, &aligned(v)?, &aligned(d_o)?);
    let Some(graph) = state.plan.backward else {
        candle_core::bail!("{OP}: the forward was planned without a backward")
    };
    let on = gpu(OP, q)?;
    let grad = |x: &Tensor| match state.has_unseen_keys {
        true => Tensor::zeros(x.shape(), x.dtype(), x.device()),
        false => Ok(Out::new(on, x.dtype(), x.elem_count())?.into_tensor(x.shape())),
    };
    let [dq, dk, dv] = [grad(q)?, grad(k)?, grad(v)?];
    let addresses = Addresses {
        q: address(OP, q)?,
        k: address(OP, k)?,
        v: address(OP, v)?,
        o: address(OP, o)?,
        stats: address(OP, &state.stats)?,
        d_o: address(OP, d_o)?,
        dq: address(OP, &dq)?,
        dk: address(OP, &dk)?,
        dv: address(OP, &dv)?,
        ..state.tables.addresses()?
    };
    // SAFETY: as in `forward`; gradients are like what they are of.
    let ran = unsafe { run(q.device(), graph, 1, addresses)? };
    Ok(ran.map(|()| [dq, dk, dv]))
}

impl DeviceTables {
    fn new(seqs: &CuSeqlens, heads: HeadCounts, batch: usize, device: &Device) -> Result<Self> {
        let Tables { lens, offsets, width } = Tables::new(seqs, heads, batch);
        let (lens, offsets) = (upload_table(&lens, (2, batch), device)?, upload_table(&offsets, (3, width), device)?);
        Ok(Self { lens, offsets, batch, width })
    }

    fn addresses(&self) -> Result<Addresses> {
        let (lens, offsets) = (address(OP, &self.lens)?, address(OP, &self.offsets)?);
        let row = (self.width * size_of::<i64>()) as DeviceAddress;
        Ok(Addresses {
            lens_q: lens,
            lens_k: lens + (self.batch * size_of::<u32>()) as DeviceAddress,
            offsets_q: offsets,
            offsets_k: offsets + row,
            offsets_stats: offsets + 2 * row,
            ..Addresses::default()
        })
    }
}

impl Cudnn {
    fn new(device: &CudaDevice) -> Explained<Self> {
        bind(device)?;
        let mut handle = null_mut();
        // SAFETY: the library is open, and the device's context is the thread's.
        call(|error, size| unsafe { candlewick_cudnn_handle(&raw mut handle, error, size) })?;
        let stream = device.cuda_stream();
        let attribute = |which| stream.context().attribute(which).map_err(|error| error.to_string());
        let major = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok(Self { handle: Pointer(handle), capability: 10 * major + minor, graphs: Graphs::new() })
    }

    /// Returns the graph of a shape, built on first use. A refusal is remembered.
    fn graph(&mut self, device: &CudaDevice, shape: Shape) -> Explained<Graph> {
        let Self { handle, graphs, .. } = self;
        graphs.get_or_build(shape, || build(handle.0, device, shape))
    }
}

fn build(handle: *mut c_void, device: &CudaDevice, shape: Shape) -> Explained<Graph> {
    fault((*VERSION).clone()?, shape.window, shape.max_k).map_or(Ok(()), Err)?;
    bind(device)?;
    let (mut graph, mut workspace) = (null_mut(), 0);
    // SAFETY: the handle is open, and what is written to lives until the call ends.
    call(|error, size| unsafe {
        let outputs = (&raw mut graph, &raw mut workspace);
        candlewick_cudnn_build(handle, &raw const shape, outputs.0, outputs.1, error, size)
    })?;
    Ok(Graph { shape, pointer: Pointer(graph), workspace_bytes: workspace.max(0) as usize })
}

/// Runs a graph, or returns the reason why cuDNN refused. A refused shape is not tried again.
///
/// # Safety
///
/// `addresses` must be valid on this device, for the graph's direction and shape.
unsafe fn run(device: &Device, graph: Graph, is_backward: i32, mut addresses: Addresses) -> Result<Explained<()>> {
    let device = device.as_cuda_device()?;
    bind(device).map_err(|why| Error::Msg(format!("{OP}: {why}")))?;
    let stream = device.cuda_stream();
    // SAFETY: a workspace is written before it is read.
    let workspace = unsafe { device.alloc::<u8>(graph.workspace_bytes.max(1))? };
    let (start, _guard) = workspace.device_ptr(&stream);
    addresses.workspace = start;
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(Cudnn { handle, graphs, .. }) = devices.get_mut(&device.id()) else {
        candle_core::bail!("{OP}: no graph was built for this device")
    };
    let (handle, pointer, stream) = (handle.0, graph.pointer.0, stream.cu_stream().cast());
    let run = || {
        // SAFETY: the caller guarantees valid addresses. The graph belongs to this handle, and the lock excludes other
        // users of both.
        call(|error, size| unsafe {
            candlewick_cudnn_run(handle, pointer, is_backward, stream, &raw const addresses, error, size)
        })
    };
    Ok(graphs.run(graph.shape, run))
}

fn bind(device: &CudaDevice) -> Explained<()> {
    device.cuda_stream().context().bind_to_thread().map_err(|error| error.to_string())
}

/// Loads cuDNN and returns its version. The library stays loaded.
fn open() -> Explained<usize> {
    let library = nvidia::load("libcudnn.so").ok_or("there is no cuDNN here (libcudnn.so.9 cannot be loaded)")?;
    let library = libloading::os::unix::Library::from(library).into_raw();
    let mut version = 0;
    // SAFETY: the library is loaded and never closed; `VERSION` calls this once.
    call(|error, size| unsafe { candlewick_cudnn_open(library, &raw mut version, error, size) })?;
    Ok(version)
}

/// Calls a C function that returns 0, or writes an error message to a buffer.
fn call(run: impl FnOnce(*mut c_char, usize) -> c_int) -> Explained<()> {
    let mut message = [0u8; MESSAGE];
    if run(message.as_mut_ptr().cast(), MESSAGE) == 0 {
        return Ok(());
    }
    let message = CStr::from_bytes_until_nul(&message).map(CStr::to_string_lossy).unwrap_or_default();
    Err(message.trim().to_owned())
}
