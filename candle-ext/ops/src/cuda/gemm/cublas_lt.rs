//! [`Gemm`] by cuBLASLt: descriptors and an algorithm are created once for each [`GemmKey`].

mod fp8;
pub(super) mod grouped;

use std::collections::{HashMap, HashSet, hash_map};
use std::ffi::c_void;
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::cublaslt::result;
use candle_core::cuda_backend::cudarc::cublaslt::sys::{self, cublasLtMatmulAlgo_t};
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaDevice, Error, Result};

use super::choices::{Choices, TunedOn};
use super::cublas::Cublas;
use super::descriptors::{Preference, Problem, WORKSPACE_BYTES};
use super::grouped::GroupedKey;
use super::key::GemmKey;
use super::lru_cache::LruCache;
use super::operands::Gemm;
use super::search::{self, Algorithm, GemmError, Library, Limits, Reductions, Route};
use crate::batch_invariance::is_batch_invariant;
use crate::cuda::{DeviceAddress, Gpu};
use crate::nvidia::{driver_version, tuned_gemms};

/// Most plans per device. A training step needs about a hundred; one takes about 2 KiB of host memory.
const MAX_PLANS: usize = 2048;

/// Most candidates for a batch-invariant algorithm.
const MAX_CANDIDATES: usize = 64;

/// Most fallbacks that are logged, each once.
const MAX_LOGGED: usize = 64;

/// Numbers of rows that a batch-invariant algorithm must support. The heuristic gets the first.
const PROBED_ROWS: [usize; 6] = [1024, 1, 2, 16, 127, 16_384];

/// Timed runs of an algorithm, after one warm-up run.
const TIMED_RUNS: usize = 3;

static DEVICES: LazyLock<Mutex<HashMap<DeviceId, CublasLt>>> = LazyLock::new(Mutex::default);

/// cuBLASLt state of one device.
struct CublasLt {
    handle: sys::cublasLtHandle_t,
    plans: LruCache<GemmKey, Plan>,
    /// Algorithms of grouped GEMMs.
    grouped: LruCache<GroupedKey, Algorithm>,
    /// Streams by address. None is ever removed: a workspace keeps its stream alive.
    streams: HashMap<usize, Stream>,
    /// Algorithms of all GEMMs that differ in rows only, with batch invariance.
    batch_invariant: HashMap<GemmKey, Algorithm>,
    /// Tuned algorithms; `None` without tuning.
    choices: Option<Choices>,
    logged: HashSet<String>,
}

// SAFETY: handles and descriptors may be used from any thread, one at a time; the lock ensures that.
unsafe impl Send for CublasLt {}

/// Workspace and handle that the matmuls of one stream share. They run one after another.
struct Stream {
    workspace: CudaSlice<u8>,
    cublas: Option<Cublas>,
}

struct Plan {
    problem: Problem,
    route: Route,
}

/// Computes a GEMM by cuBLASLt; see [`Gemm::run`].
///
/// # Safety
///
/// As for [`Gemm::run`].
pub(super) unsafe fn run(gemm: &Gemm, device: &CudaDevice) -> Result<()> {
    let failed = |error: &dyn std::fmt::Display| Error::Msg(format!("cuBLASLt failed at {gemm:?}: {error}"));
    // SAFETY: the caller guarantees valid addresses.
    CublasLt::with(device, |library| unsafe { library.run(gemm, device) }.map_err(|error| failed(&error)))
}

/// Drops the descriptors and algorithms of all devices.
pub(crate) fn forget_plans() {
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    devices.values_mut().for_each(|library| {
        library.plans.clear();
        library.grouped.clear();
        library.batch_invariant.clear();
    });
}

impl CublasLt {
    /// Calls `f` with the state of a device, whose context is then this thread's.
    fn with<T>(device: &CudaDevice, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let failed = |error: &dyn std::fmt::Display| Error::Msg(format!("cuBLASLt cannot start: {error}"));
        device.cuda_stream().context().bind_to_thread().map_err(|error| failed(&error))?;
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        f(match devices.entry(device.id()) {
            hash_map::Entry::Occupied(entry) => entry.into_mut(),
            hash_map::Entry::Vacant(entry) => entry.insert(Self::open(device)?),
        })
    }

    /// Returns the workspace of the device's stream.
    fn stream_of<'s>(
        streams: &'s mut HashMap<usize, Stream>,
        device: &CudaDevice,
    ) -> std::result::Result<&'s mut Stream, String> {
        Ok(match streams.entry(device.cuda_stream().cu_stream() as usize) {
            hash_map::Entry::Occupied(entry) => entry.into_mut(),
            hash_map::Entry::Vacant(entry) => {
                entry.insert(Stream::new(device).map_err(|error| format!("its workspace: {error}"))?)
            }
        })
    }

    fn open(device: &CudaDevice) -> Result<Self> {
        let failed = |error: &dyn std::fmt::Display| Error::Msg(format!("cuBLASLt cannot start: {error}"));
        let handle = result::create_handle().map_err(|error| failed(&error))?;
        let choices = match tuned_gemms() {
            Some(folder) => {
                let device = device.cuda_stream().context().name().map_err(|error| failed(&error))?;
                // SAFETY: the library is loaded.
                let cublas_lt = unsafe { sys::cublasLtGetVersion() };
                Some(Choices::open(folder, TunedOn { device, cublas_lt, driver: driver_version() }))
            }
            None => None,
        };
        Ok(Self {
            handle,
            plans: LruCache::new(MAX_PLANS),
            grouped: LruCache::new(MAX_PLANS),
            streams: HashMap::new(),
            batch_invariant: HashMap::new(),
            choices,
            logged: HashSet::new(),
        })
    }

    /// Computes a GEMM by the plan of its key, which is created on first use.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::run`].
    unsafe fn run(&mut self, gemm: &Gemm, device: &CudaDevice) -> std::result::Result<(), String> {
        let Self { handle, plans, streams, choices, logged, batch_invariant, .. } = self;
        let (handle, key) = (*handle, GemmKey::of(gemm));
        let stream = Self::stream_of(streams, device)?;
        // A transposed a has rows of weight gradients, which sum over the batch.
        let is_invariant = is_batch_invariant() && !gemm.a.is_transposed;
        if let Some(Plan { problem, route }) = plans.get(&key) {
            let ran = Call::new(handle, gemm, problem, stream, device).and_then(|mut call| call.follow(*route));
            match ran {
                Ok(()) => return Ok(()),
                // cublasGemmEx has overwritten c before it refuses, so nothing can be retried.
                Err(GemmError::Refused(why)) if *route == Route::GemmEx || is_invariant => return Err(why),
                Err(GemmError::Refused(_)) => {}
                Err(GemmError::Fatal(why)) => return Err(why),
            }
        }
        fp8::check(gemm.inputs, device)?;
        let problem = Problem::new(gemm).map_err(|failure| failure.to_string())?;
        if is_invariant {
            let algorithm = match batch_invariant.entry(key.without_rows()) {
                hash_map::Entry::Occupied(entry) => *entry.get(),
                hash_map::Entry::Vacant(entry) => {
                    *entry.insert(batch_invariant_algorithm(handle, gemm, (key.without_rows(), stream, device))?)
                }
            };
            let mut call = Call::new(handle, gemm, &problem, stream, device).map_err(|failure| failure.to_string())?;
            call.multiply(&algorithm).map_err(|failure| format!("batch_invariant: {failure}"))?;
            plans.insert(key, Plan { problem, route: Route::Lt(algorithm) });
            return Ok(());
        }
        let mut call = Call::new(handle, gemm, &problem, stream, device).map_err(|failure| failure.to_string())?;
        let tuned = match choices {
            Some(choices) => choices.choose(&mut call, &key)?,
            None => None,
        };
        let found = search::compute(&mut call, &key, tuned)?;
        if let Some(fallback) = found.fallback {
            log(logged, format!("GEMM {key}: computed by {fallback}"));
        }
        plans.insert(key, Plan { problem, route: found.route });
        Ok(())
    }
}

/// Finds an algorithm for GEMMs like `gemm` with any number of rows. It splits no sum, so a row's bits do not depend on the
/// number of rows.
fn batch_invariant_algorithm(
    handle: sys::cublasLtHandle_t,
    gemm: &Gemm,
    (key, stream, device): (GemmKey, &mut Stream, &CudaDevice),
) -> std::result::Result<Algorithm, String> {
    let gemms = PROBED_ROWS.map(|m| Gemm { m, ..*gemm });
    let problems = gemms.iter().map(Problem::new).collect::<std::result::Result<Vec<_>, _>>();
    let problems = problems.map_err(|failure| failure.to_string())?;
    let limits = Limits { reductions: Reductions::Unsplit, alignments: key.alignments };
    let mut call = Call::new(handle, &gemms[0], &problems[0], stream, device).map_err(|failure| failure.to_string())?;
    let candidates =
        call.candidates(&limits, MAX_CANDIDATES).map_err(|failure| format!("batch_invariant: {failure}"))?;
    let mut supports = |algorithm: &Algorithm| {
        gemms.iter().zip(&problems).all(|(gemm, problem)| {
            Call::new(handle, gemm, problem, stream, device).and_then(|mut call| call.check(algorithm)).is_ok()
        })
    };
    let found = candidates.into_iter().find(|algorithm| supports(algorithm));
    found.ok_or_else(|| format!("batch_invariant: no algorithm of cuBLASLt computes {key} with every number of rows"))
}

/// Logs a warning about a fallback, once.
fn log(logged: &mut HashSet<String>, message: String) {
    if logged.len() < MAX_LOGGED && !logged.contains(&message) {
        tracing::warn!("{message}");
        logged.insert(message);
    }
}

impl Stream {
    fn new(device: &CudaDevice) -> Result<Self> {
        // SAFETY: a workspace is written before it is read.
        let workspace = unsafe { device.alloc::<u8>(WORKSPACE_BYTES)? };
        Ok(Self { workspace, cublas: None })
    }

    fn workspace(&self, device: &CudaDevice) -> DeviceAddress {
        self.workspace.device_ptr(&device.cuda_stream()).0
    }
}

/// A GEMM with the objects that its calls need.
struct Call<'a> {
    handle: sys::cublasLtHandle_t,
    gemm: &'a Gemm,
    problem: &'a Problem,
    stream: &'a mut Stream,
    device: &'a CudaDevice,
}

impl<'a> Call<'a> {
    fn new(
        handle: sys::cublasLtHandle_t,
        gemm: &'a Gemm,
        problem: &'a Problem,
        stream: &'a mut Stream,
        device: &'a CudaDevice,
    ) -> std::result::Result<Self, GemmError> {
        problem.set_addresses(gemm)?;
        Ok(Self { handle, gemm, problem, stream, device })
    }

    fn follow(&mut self, route: Route) -> std::result::Result<(), GemmError> {
        match route {
            Route::Lt(algorithm) => self.multiply(&algorithm),
            Route::GemmEx => self.multiply_by_gemm_ex(),
        }
    }

    fn workspace(&self) -> DeviceAddress {
        self.stream.workspace(self.device)
    }

    /// Launches the matmul: `output` = `addend` + a b.
    ///
    /// # Safety
    ///
    /// Both addresses must be valid for a matrix like c.
    unsafe fn launch(
        &self,
        algorithm: &Algorithm,
        addend: DeviceAddress,
        output: DeviceAddress,
    ) -> std::result::Result<(), GemmError> {
        let Self { gemm, problem, .. } = self;
        let (alpha, beta) = (gemm.factor, if gemm.plus.is_some() { 1.0f32 } else { 0.0 });
        let algorithm = cublasLtMatmulAlgo_t { data: algorithm.0 };
        // SAFETY: the layouts are those of the caller's matrices; the workspace belongs to this stream.
        let status = unsafe {
            result::matmul(
                self.handle,
                problem.description.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                gemm.b.address as *const c_void,
                problem.first.0,
                gemm.a.address as *const c_void,
                problem.second.0,
                addend as *const c_void,
                problem.output.0,
                output as *mut c_void,
                problem.output.0,
                &raw const algorithm,
                self.workspace() as *mut c_void,
                WORKSPACE_BYTES,
                self.device.cuda_stream().cu_stream().cast(),
            )
        };
        status.map_err(|error| GemmError::of_status(error.0))
    }

    /// Times runs of an algorithm into `output`, in microseconds.
    ///
    /// # Safety
    ///
    /// As for [`Call::launch`].
    unsafe fn time(&self, algorithm: &Algorithm, output: DeviceAddress) -> std::result::Result<f32, GemmError> {
        let fatal = |error: &dyn std::fmt::Display| GemmError::Fatal(error.to_string());
        let addend = self.gemm.plus.filter(|plus| *plus != self.gemm.c).unwrap_or(output);
        let stream = self.device.cuda_stream();
        let mut events = Vec::with_capacity(TIMED_RUNS + 1);
        for _ in 0..=TIMED_RUNS {
            // SAFETY: the caller guarantees a valid output.
            unsafe { self.launch(algorithm, addend, output)? };
            let event = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
            events.push(event.map_err(|error| fatal(&error))?);
        }
        let mut least = f32::INFINITY;
        for pair in events.windows(2) {
            least = least.min(pair[0].elapsed_ms(&pair[1]).map_err(|error| fatal(&error))?);
        }
        Ok(1000.0 * least)
    }
}

impl Library for Call<'_> {
    fn candidates(&mut self, limits: &Limits, n: usize) -> std::result::Result<Vec<Algorithm>, GemmError> {
        let preference = Preference::of(limits).map_err(|error| GemmError::of_status(error.0))?;
        let Problem { description, first, second, output } = self.problem;
        let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> = Vec::with_capacity(n);
        let mut n_found = 0;
        // SAFETY: the descriptors outlive the call, and the buffer holds as many results as requested.
        let status = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                description.0,
                first.0,
                second.0,
                output.0,
                output.0,
                preference.0,
                n as i32,
                found.as_mut_ptr(),
                &raw mut n_found,
            )
        };
        status.result().map_err(|error| GemmError::of_status(error.0))?;
        // SAFETY: the library has written `n_found` results.
        unsafe { found.set_len(usize::try_from(n_found).unwrap_or(0).min(n)) };
        let usable = found.iter().filter(|result| result.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        let algorithms: Vec<Algorithm> = usable.map(|result| Algorithm(result.algo.data)).collect();
        if algorithms.is_empty() {
            return Err(GemmError::Refused("its heuristic has no algorithm".into()));
        }
        Ok(algorithms)
    }

    fn check(&mut self, algorithm: &Algorithm) -> std::result::Result<(), GemmError> {
        let Problem { description, first, second, output } = self.problem;
        let algorithm = cublasLtMatmulAlgo_t { data: algorithm.0 };
        let mut checked = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::zeroed();
        // SAFETY: the descriptors outlive the call, and the result is written to valid memory.
        let checked = unsafe {
            let (description, first, second, output) = (description.0, first.0, second.0, output.0);
            let (algorithm, result) = (&raw const algorithm, checked.as_mut_ptr());
            sys::cublasLtMatmulAlgoCheck(self.handle, description, first, second, output, output, algorithm, result)
                .result()
                .map_err(|error| GemmError::of_status(error.0))?;
            checked.assume_init()
        };
        match checked.workspaceSize {
            0..=WORKSPACE_BYTES => Ok(()),
            more => Err(GemmError::Refused(format!("it needs a workspace of {more} bytes, not {WORKSPACE_BYTES}"))),
        }
    }

    fn multiply(&mut self, algorithm: &Algorithm) -> std::result::Result<(), GemmError> {
        // SAFETY: the caller of `run` guarantees valid addresses.
        unsafe { self.launch(algorithm, self.gemm.plus.unwrap_or(self.gemm.c), self.gemm.c) }
    }

    fn multiply_by_gemm_ex(&mut self) -> std::result::Result<(), GemmError> {
        let workspace = self.workspace();
        let cublas = match &mut self.stream.cublas {
            Some(cublas) => cublas,
            // SAFETY: the workspace belongs to this stream and is never freed.
            none => none.insert(unsafe { Cublas::open(&self.device.cuda_stream(), workspace, WORKSPACE_BYTES)? }),
        };
        // SAFETY: the caller of `run` guarantees valid addresses.
        unsafe { cublas.run(self.gemm, Gpu::Device(self.device)) }
    }

    fn microseconds(&mut self, algorithm: &Algorithm) -> std::result::Result<f32, GemmError> {
        let Gemm { m, n, c_dtype, .. } = *self.gemm;
        let [_, _, stride] = self.gemm.output().in_memory([m, n]);
        let n_bytes = ((m - 1) * stride + n) * c_dtype.size_in_bytes();
        // SAFETY: nothing reads the output.
        let output = unsafe { self.device.alloc::<u8>(n_bytes) }
            .map_err(|error| GemmError::Refused(format!("there is no memory to time it: {error}")))?;
        let stream = self.device.cuda_stream();
        let (address, _guard) = output.device_ptr(&stream);
        // SAFETY: the output is as large as c.
        unsafe { self.time(algorithm, address) }
    }
}

#[cfg(all(test, feature = "emulate"))]
#[allow(clippy::unwrap_used)]
mod tests;
