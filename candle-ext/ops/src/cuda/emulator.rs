//! Emulation of CUDA kernels on the CPU, with a fiber per thread, over tensors in host memory.
//!
//! It serves tests without a GPU. `emulator/` holds the C++ side.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use std::slice;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use candle_core::{CpuStorage, DType, Error, Result, bail};
use half::{bf16, f16};
use libloading::Library;

use super::arg::{Arg, Blocks, DeviceAddress};
use super::compiled::Kernels;
use super::gemm::grouped::{GroupedGemm, GroupedOutput, GroupedProblems};
use super::gemm::operands::{Fp8Accumulation, Fp8Inputs, Gemm, GemmInputs, Matrix, ScaledInput, Scaling};
use crate::fp8::Fp8Format;
use crate::thread_value::with_value;

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
    static LIMIT: Cell<Option<MemoryLimit>> = const { Cell::new(None) };
    static WORK: RefCell<Option<EmulatedWork>> = const { RefCell::new(None) };
    /// Seed of the next launch's order of blocks and lanes.
    static SEED: Cell<u64> = const { Cell::new(0) };
}

/// Launches and outputs of an emulated function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmulatedWork {
    /// Names of the kernels in the order of their launches; `gemm` for each matmul of cuBLASLt.
    pub launches: Vec<String>,
    /// Bytes of the tensors that kernels were given to write.
    pub output_bytes: usize,
}

/// Memory limit of the emulated device.
#[derive(Clone, Copy, Debug)]
pub struct MemoryLimit {
    /// Total bytes of the device.
    pub total_bytes: u64,
    /// Function that returns the bytes in use now.
    pub in_use: fn() -> u64,
    /// Function that returns the peak of the bytes in use.
    pub peak: fn() -> u64,
}

/// Difference of the seeds of two launches.
const SEED_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Bytes of the reason of a failure, with the path of a source.
const FAILURE_BYTES: usize = 4096;

static LIBRARIES: LazyLock<Mutex<HashMap<&'static str, Arc<Library>>>> = LazyLock::new(Mutex::default);

/// Runs `f` with every op on CPU tensors computed by its CUDA kernel, backward included. Slow: for tests only.
///
/// Each launch draws another order of the lanes of a warp, and of the blocks.
pub fn emulate<T>(f: impl FnOnce() -> T) -> T {
    with_value(&ON, true, f)
}

/// Runs `f` as [`emulate`] does. Also returns its launches and the bytes of its outputs on this thread.
pub fn emulate_counted<T>(f: impl FnOnce() -> T) -> (T, EmulatedWork) {
    let outer = WORK.replace(Some(EmulatedWork::default()));
    let result = emulate(f);
    (result, WORK.replace(outer).unwrap_or_default())
}

/// Counts work for [`emulate_counted`].
fn count(add: impl FnOnce(&mut EmulatedWork)) {
    WORK.with_borrow_mut(|work| {
        if let Some(work) = work {
            add(work);
        }
    });
}

/// Runs `f` as [`emulate`] does, with orders of lanes and blocks drawn from a seed. A seed repeats them.
pub fn emulate_with_seed<T>(seed: u64, f: impl FnOnce() -> T) -> T {
    with_value(&SEED, seed.wrapping_mul(SEED_STEP), || emulate(f))
}

/// Runs `f` as [`emulate`] does, on a device with the memory of `limit`. Ops that exceed it fail to allocate.
pub fn emulate_with_limit<T>(limit: MemoryLimit, f: impl FnOnce() -> T) -> T {
    with_value(&LIMIT, Some(limit), || emulate(f))
}

/// Returns the memory limit of the emulated device, if there is one.
pub(crate) fn memory_limit() -> Option<MemoryLimit> {
    LIMIT.get().filter(|_| is_on())
}

/// Returns true if this thread is inside [`emulate`].
pub(crate) fn is_on() -> bool {
    ON.get()
}

/// Function `call_NAME` of a kernel: reads each parameter, by its type, from eight bytes of its own.
type Call = unsafe extern "C" fn(*const u64);

/// Runs a kernel in the emulator; see [`Kernels::launch`].
///
/// # Safety
///
/// As for [`Kernels::launch`].
pub(super) unsafe fn launch(kernels: &Kernels, name: &str, blocks: Blocks, args: &[Arg]) -> Result<()> {
    type Emulate = unsafe extern "C" fn(Call, *const u64, *const u32, u32, u32, u64, *mut c_char, usize) -> bool;
    count(|work| work.launches.push(name.to_owned()));
    let library = library(kernels)?;
    let failed = |error: libloading::Error| Error::Msg(format!("{}: {name}: {error}", kernels.op));
    // SAFETY: the library is built from `emulator.cpp` and `call.h`, whose functions have these types.
    let (emulate, call) = unsafe {
        let emulate = library.get::<Emulate>(b"emulate").map_err(failed)?;
        (emulate, library.get::<Call>(format!("call_{name}").as_bytes()).map_err(failed)?)
    };
    let arguments: Vec<u64> = args.iter().map(bytes).collect();
    let Blocks { grid, threads, shared_bytes } = blocks;
    let grid = grid.map(|n| n as u32);
    let seed = SEED.replace(SEED.get().wrapping_add(SEED_STEP));
    let (grid, mut failure) = (grid.as_ptr(), [0; FAILURE_BYTES]);
    let (text, n) = (failure.as_mut_ptr(), failure.len());
    // SAFETY: the caller guarantees valid arguments, whose number and classes were checked; they outlive the run. The failure
    // can be written.
    let is_right =
        unsafe { emulate(*call, arguments.as_ptr(), grid, threads as u32, shared_bytes as u32, seed, text, n) };
    if is_right {
        return Ok(());
    }
    // SAFETY: snprintf ends the text with a zero.
    let why = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    bail!("{}: emulated kernel {name}, {why}", kernels.op)
}

/// Returns the bytes of an argument. A 4-byte argument takes the low bytes, as on any little-endian processor.
fn bytes(arg: &Arg) -> u64 {
    match *arg {
        Arg::Address(value) | Arg::U64(value) => value,
        Arg::I64(value) => value.cast_unsigned(),
        Arg::I32(value) => value.cast_unsigned().into(),
        Arg::F32(value) => value.to_bits().into(),
        Arg::F64(value) => value.to_bits(),
    }
}

fn library(kernels: &Kernels) -> Result<Arc<Library>> {
    let mut libraries = LIBRARIES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = libraries.get(kernels.op) {
        return Ok(library.clone());
    }
    // SAFETY: the library is built from this package's code and has no initialisers.
    let library = unsafe { Library::new(kernels.library) }.map_err(|error| Error::Msg(error.to_string()))?;
    let library = Arc::new(library);
    libraries.insert(kernels.op, library.clone());
    Ok(library)
}

/// Returns the address of a storage's first element.
pub(super) fn base(op: &str, storage: &CpuStorage) -> Result<DeviceAddress> {
    Ok(match storage {
        CpuStorage::F32(data) => data.as_ptr().expose_provenance(),
        CpuStorage::BF16(data) => data.as_ptr().expose_provenance(),
        CpuStorage::F16(data) => data.as_ptr().expose_provenance(),
        CpuStorage::U32(data) => data.as_ptr().expose_provenance(),
        CpuStorage::I64(data) => data.as_ptr().expose_provenance(),
        CpuStorage::F64(data) => data.as_ptr().expose_provenance(),
        CpuStorage::U8(data) => data.as_ptr().expose_provenance(),
        _ => bail!("{op}: there is no kernel for this dtype"),
    } as u64)
}

/// Allocates elements filled with NaN, so that one that a kernel fails to write is noticed.
///
/// # Errors
///
/// The CUDA driver's out-of-memory error, beyond the limit of [`emulate_with_limit`].
pub(super) fn alloc(dtype: DType, len: usize) -> Result<CpuStorage> {
    let n_bytes = (len * dtype.size_in_bytes()) as u64;
    if LIMIT.get().is_some_and(|limit| (limit.in_use)() + n_bytes > limit.total_bytes) {
        bail!("allocate {n_bytes} bytes: DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")")
    }
    count(|work| work.output_bytes += n_bytes as usize);
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(vec![f32::NAN; len]),
        DType::BF16 => CpuStorage::BF16(vec![bf16::NAN; len]),
        DType::F16 => CpuStorage::F16(vec![f16::NAN; len]),
        DType::F64 => CpuStorage::F64(vec![f64::NAN; len]),
        DType::I64 => CpuStorage::I64(vec![i64::MIN; len]),
        DType::U32 => CpuStorage::U32(vec![u32::MAX; len]),
        DType::U8 => CpuStorage::U8(vec![u8::MAX; len]),
        other => bail!("there is no kernel that writes {other:?}"),
    })
}

/// Computes a GEMM by plain loops, rounded once like cuBLASLt's; see [`Gemm::run`].
///
/// # Safety
///
/// As for [`Gemm::run`].
pub(super) unsafe fn gemm(gemm: &Gemm) -> Result<()> {
    count(|work| work.launches.push("gemm".to_owned()));
    let Gemm { m, n, k, a, b, .. } = *gemm;
    if let GemmInputs::Floats(dtype) = gemm.inputs
        && ![dtype, DType::F32].contains(&gemm.c_dtype)
    {
        bail!("emulator: cuBLASLt has no GEMM of {dtype:?} inputs with a {:?} output", gemm.c_dtype)
    }
    let len = |[rows, columns, stride]: [usize; 3]| rows.checked_sub(1).map_or(0, |last| last * stride + columns);
    let (of_a, of_b, of_c) = (a.in_memory([m, k]), b.in_memory([k, n]), gemm.output().in_memory([m, n]));
    // SAFETY: the caller guarantees valid addresses.
    let (a_values, b_values): (Vec<f64>, Vec<f64>) = match gemm.inputs {
        GemmInputs::Floats(dtype) => unsafe {
            let wide = |x: Vec<f32>| x.into_iter().map(f64::from).collect();
            (wide(read(a.address, dtype, len(of_a))?), wide(read(b.address, dtype, len(of_b))?))
        },
        GemmInputs::Fp8(Fp8Inputs { a: scaled_a, b: scaled_b, .. }) => {
            check_fp8(gemm, [of_a, of_b])?;
            // SAFETY: as above.
            unsafe { (read_fp8(a.address, scaled_a, [m, k]), read_fp8(b.address, scaled_b, [n, k])) }
        }
    };
    // SAFETY: as above. Elements in the gaps between rows are written back unchanged.
    let mut c = unsafe { read(gemm.c, gemm.c_dtype, len(of_c))? };
    // SAFETY: as above.
    let plus = gemm.plus.map(|plus| unsafe { read(plus, gemm.c_dtype, len(of_c)) }).transpose()?;
    // SAFETY: as above.
    let bias = gemm.bias.map(|bias| unsafe { read(bias, gemm.c_dtype, n) }).transpose()?;
    let at = |values: &[f64], matrix: Matrix, [_, _, stride]: [usize; 3], i: usize, j: usize| {
        values[if matrix.is_transposed { j * stride + i } else { i * stride + j }]
    };
    for i in 0..m {
        let row = i * of_c[2]..i * of_c[2] + n;
        let old = |values: &Option<Vec<f32>>, from: usize| match values {
            Some(values) => values[from..from + n].iter().map(|x| f64::from(*x)).collect(),
            None => vec![0.0; n],
        };
        let mut sums: Vec<f64> = old(&plus, row.start);
        sums.iter_mut().zip(old(&bias, 0)).for_each(|(sum, bias)| *sum += bias);
        for p in 0..k {
            let left = f64::from(gemm.factor) * at(&a_values, a, of_a, i, p);
            sums.iter_mut().enumerate().for_each(|(j, sum)| *sum += left * at(&b_values, b, of_b, p, j));
        }
        c[row].iter_mut().zip(sums).for_each(|(c, sum)| *c = sum as f32);
    }
    // SAFETY: as above.
    unsafe { write(gemm.c, gemm.c_dtype, &c) }
}

/// Fails unless cuBLASLt would multiply these FP8 operands on Hopper.
fn check_fp8(gemm: &Gemm, of_inputs: [[usize; 3]; 2]) -> Result<()> {
    let (Gemm { m, n, k, a, b, .. }, GemmInputs::Fp8(inputs)) = (*gemm, gemm.inputs) else { return Ok(()) };
    let both_e5m2 = [inputs.a.format, inputs.b.format] == [Fp8Format::E5m2; 2];
    let blocks = [inputs.a.scaling, inputs.b.scaling];
    let is_fast_with_blocks = blocks != [Scaling::Tensor; 2] && inputs.accumulation == Fp8Accumulation::Fast;
    let is_aligned = [m, n, k].iter().all(|size| size.is_multiple_of(16))
        && of_inputs.iter().all(|[_, columns, stride]| columns == stride)
        && [a.address, b.address, gemm.c].iter().all(|address| address.is_multiple_of(16));
    let mixes = blocks.contains(&Scaling::Tensor) && blocks != [Scaling::Tensor; 2];
    if a.is_transposed || !b.is_transposed || both_e5m2 || mixes || is_fast_with_blocks || !is_aligned {
        bail!("cuBLASLt has no FP8 matmul for {gemm:?}")
    }
    if blocks == [Scaling::Block128; 2] {
        bail!("cuBLASLt cannot scale both operands per 128x128 elements")
    }
    Ok(())
}

/// Reads FP8 codes [rows, k] times their inverse scales.
///
/// # Safety
///
/// There must be as many codes, and inverse scales as the scaling demands.
unsafe fn read_fp8(codes: DeviceAddress, scaled: ScaledInput, [rows, k]: [usize; 2]) -> Vec<f64> {
    let ScaledInput { format, scale_inv, scaling } = scaled;
    let (n_scales, [row_stride, column_stride]) = scaling.layout(rows, k);
    // SAFETY: the caller's contract; the memory was exposed by `base`.
    let (codes, scales) = unsafe {
        (
            slice::from_raw_parts(with_exposed_provenance::<u8>(codes as usize), rows * k),
            slice::from_raw_parts(with_exposed_provenance::<f32>(scale_inv as usize), n_scales),
        )
    };
    let value = |i: usize| {
        let scale = scales[i / k / scaling.block_rows() * row_stride + i % k / 128 * column_stride];
        f64::from(format.values()[usize::from(codes[i])]) * f64::from(scale)
    };
    (0..rows * k).map(value).collect()
}

/// Emulates a grouped GEMM, group by group. A matrix that is undefined becomes NaN.
///
/// # Safety
///
/// As for [`GroupedGemm::run`].
pub(super) unsafe fn grouped_gemm(grouped: &GroupedGemm) -> Result<()> {
    let GroupedGemm { output, adds, dtype, output_dtype, e, n: n_rows, arrays, .. } = *grouped;
    // SAFETY: the caller guarantees arrays of e elements; the memory was exposed by `base`.
    let (addresses, sizes, [alpha, beta]) = unsafe {
        let addresses = [arrays.x, arrays.y, arrays.w]
            .map(|at| slice::from_raw_parts(with_exposed_provenance::<u64>(at as usize), e));
        let sizes = [arrays.n_in, arrays.n_out, arrays.n_rows]
            .map(|at| slice::from_raw_parts(with_exposed_provenance::<i32>(at as usize), e));
        let factors = [arrays.alpha, arrays.beta].map(|at| *with_exposed_provenance::<f32>(at as usize));
        (addresses, sizes, factors)
    };
    if (alpha, beta) != (1.0, if adds { 1.0 } else { 0.0 }) {
        bail!("grouped GEMM: the factors are {alpha} and {beta}")
    }
    let sizes_are = |of: usize, size: usize| sizes[of].iter().all(|found| *found as usize == size);
    let n_used: i64 = sizes[2].iter().map(|n| i64::from(*n)).sum();
    if !sizes_are(0, grouped.n_in) || !sizes_are(1, grouped.n_out) || n_used > n_rows as i64 {
        bail!("grouped GEMM: the arrays have other sizes than {grouped:?}")
    }
    for group in 0..e {
        let [x, y, w] = addresses.map(|of| of[group]);
        let [n_in, n_out, n] = sizes.map(|of| of[group] as usize);
        let (sizes, a, b, c) = match output {
            GroupedOutput::Y => ([n, n_out, n_in], Matrix::plain(x), Matrix::transposed(w), y),
            GroupedOutput::X => ([n, n_in, n_out], Matrix::plain(y), Matrix::plain(w), x),
            GroupedOutput::W => ([n_out, n_in, n], Matrix::transposed(y), Matrix::plain(x), w),
        };
        let product = Gemm { a, b, c, c_dtype: output_dtype, plus: adds.then_some(c), ..Gemm::new(sizes, dtype) };
        // SAFETY: the caller guarantees valid addresses.
        unsafe {
            match (output, n, adds) {
                (GroupedOutput::W, 0, false) => write(c, output_dtype, &vec![f32::NAN; n_in * n_out])?,
                _ => gemm(&product)?,
            }
        }
    }
    Ok(())
}

/// Emulates a grouped GEMM of CUTLASS, group by group. Fails if a matrix is misaligned, has gaps between its rows, or is a
/// sum over zero terms.
///
/// # Safety
///
/// As for [`GroupedProblems::run`].
pub(super) unsafe fn grouped_problems(problems: &GroupedProblems) -> Result<()> {
    let GroupedProblems { output, adds, output_dtype, e, tile, arrays } = *problems;
    if tile.usage != output.tile_use() {
        bail!("grouped GEMM: the tile {} has no kernel of {output:?}", tile.name)
    }
    // SAFETY: the caller guarantees arrays of e elements, or sizes of 3 e; the memory was exposed by `base`.
    let (sizes, addresses, strides) = unsafe {
        let sizes = slice::from_raw_parts(with_exposed_provenance::<[i32; 3]>(arrays.sizes as usize), e);
        let run = |at: DeviceAddress| slice::from_raw_parts(with_exposed_provenance::<u64>(at as usize), e);
        (sizes, arrays.addresses.map(run), arrays.strides.map(run))
    };
    for group in 0..e {
        let [m, n, k] = sizes[group].map(|size| size as usize);
        let packed = match output {
            GroupedOutput::Y => [k, k, n],
            GroupedOutput::X => [k, n, n],
            GroupedOutput::W => [m, n, n],
        };
        let ([left, right, c], of_rows) = (addresses.map(|of| of[group]), strides.map(|of| of[group] as usize));
        if m * n == 0 {
            continue;
        }
        if of_rows != packed || k == 0 || [left, right, c].iter().any(|at| at % 16 != 0) {
            bail!(
                "grouped GEMM: group {group} of {m} x {n} x {k} has strides {of_rows:?} at {left:x}, {right:x}, {c:x}"
            )
        }
        let (a, b) = match output {
            GroupedOutput::Y => (Matrix::plain(left), Matrix::transposed(right)),
            GroupedOutput::X => (Matrix::plain(left), Matrix::plain(right)),
            GroupedOutput::W => (Matrix::transposed(left), Matrix::plain(right)),
        };
        let plus = adds.then_some(c);
        // SAFETY: the caller guarantees valid addresses.
        unsafe { gemm(&Gemm { a, b, c, c_dtype: output_dtype, plus, ..Gemm::new([m, n, k], DType::BF16) })? };
    }
    Ok(())
}

/// Reads `len` elements as f32.
///
/// # Safety
///
/// `address` must hold `len` elements of this dtype.
unsafe fn read(address: DeviceAddress, dtype: DType, len: usize) -> Result<Vec<f32>> {
    let at = address as usize;
    // SAFETY: the caller's contract; the memory was exposed by `base`.
    unsafe {
        Ok(match dtype {
            DType::F32 => slice::from_raw_parts(with_exposed_provenance::<f32>(at), len).to_vec(),
            DType::BF16 => {
                slice::from_raw_parts(with_exposed_provenance::<bf16>(at), len).iter().map(|x| x.to_f32()).collect()
            }
            DType::F16 => {
                slice::from_raw_parts(with_exposed_provenance::<f16>(at), len).iter().map(|x| x.to_f32()).collect()
            }
            other => bail!("there is no GEMM of {other:?}"),
        })
    }
}

/// Writes the values, rounded to `dtype`.
///
/// # Safety
///
/// `address` must be writable for all values in this dtype.
unsafe fn write(address: DeviceAddress, dtype: DType, values: &[f32]) -> Result<()> {
    let at = address as usize;
    for (i, value) in values.iter().enumerate() {
        // SAFETY: the caller's contract; the memory was exposed by `base`.
        unsafe {
            match dtype {
                DType::F32 => with_exposed_provenance_mut::<f32>(at).add(i).write(*value),
                DType::BF16 => with_exposed_provenance_mut::<bf16>(at).add(i).write(bf16::from_f32(*value)),
                DType::F16 => with_exposed_provenance_mut::<f16>(at).add(i).write(f16::from_f32(*value)),
                other => bail!("there is no GEMM of {other:?}"),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
