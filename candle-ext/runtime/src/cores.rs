//! Compute settings of a process: number of threads, CPU and CUDA kernels, GEMM tuning and CUDA module loading.
//!
//! `launch` sets the number of threads of its ranks. This module sets it for ranks of torchrun, MPI or Slurm.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use candlewick_comm::CommBackend;

use crate::exit::ExitCode;
use crate::rank_env::rank_env;
use crate::terminal::print_note;

/// Number of threads that any machine may start.
const MAX_THREADS: usize = 256;
/// Number of threads of rayon and candle.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Divides the node's cores among its ranks: sets RAYON_NUM_THREADS if it is unset and the node has several ranks.
///
/// Call it before the process starts a second thread.
pub fn divide_cores() {
    limit_threads();
    // Invalid launch variables are reported later.
    let n_processes = rank_env().map_or(1, |env| env.local_world_size);
    if n_processes < 2 || std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| count(line.strip_prefix("Cpus_allowed_list:")?));
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok().and_then(|list| count(&list));
    let n_threads = threads_per_process(n_processes, available, allowed.zip(online));
    // SAFETY: no other thread exists yet that could read the environment. candle reads the variable at every matmul, so a
    // thread pool cannot replace it.
    unsafe { std::env::set_var(VARIABLE, n_threads.to_string()) };
}

/// Clamps an excessive RAYON_NUM_THREADS: the start of 100,000 threads takes half a minute.
fn limit_threads() {
    let Some(requested) = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<usize>().ok()) else { return };
    let max_threads = MAX_THREADS.max(2 * std::thread::available_parallelism().map_or(1, usize::from));
    if requested > max_threads {
        print_note(&format!(
            "warning: {VARIABLE}={requested} exceeds the limit of {max_threads} threads; starting {max_threads}"
        ));
        // SAFETY: no other thread exists yet that could read the environment.
        unsafe { std::env::set_var(VARIABLE, max_threads.to_string()) };
    }
}

/// Sets CUDA_MODULE_LOADING=EAGER if it is unset, NCCL is built in and the job has several ranks.
///
/// With lazy loading, CUDA loads a kernel at its first launch and may synchronize with the device. The device may run an NCCL
/// operation that waits for another rank, which may wait for this one: a deadlock.
///
/// Call it before the process starts a second thread.
pub fn load_kernels_eagerly() {
    const LOADING: &str = "CUDA_MODULE_LOADING";
    let n_ranks = rank_env().map_or(1, |env| env.world_size);
    if let Some(loading) = module_loading(n_ranks, std::env::var_os(LOADING)).filter(|_| CommBackend::HAS_NCCL) {
        // SAFETY: no other thread exists yet that could read the environment. The driver reads the variable when it is initialized.
        unsafe { std::env::set_var(LOADING, loading) };
    }
}

/// Returns the value of CUDA_MODULE_LOADING for a job of `n_ranks`, or `None` if it needs none or the user has set one.
fn module_loading(n_ranks: usize, of_user: Option<OsString>) -> Option<&'static str> {
    (n_ranks > 1 && of_user.is_none()).then_some("EAGER")
}

/// Selects the CPU kernel of matmuls that CANDLEWICK_CPU_GEMM names, to reproduce the bits of another processor.
///
/// Call it before any computation. CANDLEWICK_CPU_PRODUCT, the variable's former name, is still read.
pub fn select_cpu_gemm_kernel() -> Result<()> {
    const VARIABLE: &str = "CANDLEWICK_CPU_GEMM";
    const FORMER: &str = "CANDLEWICK_CPU_PRODUCT";
    let former = || {
        let name = std::env::var_os(FORMER)?;
        print_note(&format!("note: {FORMER} is now called {VARIABLE}"));
        Some(name)
    };
    let Some(name) = std::env::var_os(VARIABLE).or_else(former) else { return Ok(()) };
    let selected = candlewick_ops::select_cpu_gemm_kernel(&name.to_string_lossy());
    selected.map_err(anyhow::Error::from).context(format!("failed to apply {VARIABLE}")).context(ExitCode::Usage)
}

/// Replaces this program's CUDA kernels by those in the folder CANDLEWICK_KERNELS, loads CUTLASS's tiles from the folder
/// CANDLEWICK_CUTLASS, and selects the kernels that quantize to FP8 by CANDLEWICK_FP8_QUANTIZE_KERNELS: `fused`, `registers` or
/// `shared_memory`.
///
/// Call it before any computation.
pub fn override_kernels() -> Result<()> {
    const FP8_KERNELS: &str = "CANDLEWICK_FP8_QUANTIZE_KERNELS";
    if let Some(name) = std::env::var_os(FP8_KERNELS).filter(|name| !name.is_empty()) {
        let selected = name.to_string_lossy().parse().map_err(anyhow::Error::msg);
        let selected = selected.context(format!("failed to apply {FP8_KERNELS}")).context(ExitCode::Usage);
        candlewick_ops::Fp8Kernels::select(selected?);
    }
    with_folder("CANDLEWICK_KERNELS", candlewick_ops::replace_kernels)?;
    with_folder("CANDLEWICK_CUTLASS", candlewick_ops::load_cutlass_from)
}

/// Calls a function with the folder of a variable, unless that is unset or empty.
fn with_folder<E: Into<anyhow::Error>>(variable: &str, apply: impl FnOnce(&Path) -> Result<(), E>) -> Result<()> {
    let Some(folder) = std::env::var_os(variable).filter(|folder| !folder.is_empty()) else { return Ok(()) };
    let applied = apply(folder.as_ref()).map_err(E::into);
    applied.context(format!("failed to apply {variable}")).context(ExitCode::Usage)
}

/// Enables autotuning of cuBLASLt algorithms if CANDLEWICK_GEMM_TUNE is 1. The cache folder keeps the fastest.
///
/// Call it before any computation.
pub fn tune_gemms() -> Result<()> {
    const TUNE: &str = "CANDLEWICK_GEMM_TUNE";
    if is_on(TUNE, std::env::var_os(TUNE).as_deref()).context(ExitCode::Usage)? {
        candlewick_ops::tune_gemms(cache_folder().join("gemm"));
    }
    Ok(())
}

/// Parses a variable that is 1 or 0. Unset and empty mean 0.
fn is_on(name: &str, value: Option<&OsStr>) -> Result<bool> {
    match value.map(OsStr::to_string_lossy).as_deref() {
        None | Some("" | "0") => Ok(false),
        Some("1") => Ok(true),
        Some(other) => bail!("{name}={other}: expected 1 or 0"),
    }
}

/// Returns the cache folder: `$XDG_CACHE_HOME/candlewick`, or `~/.cache/candlewick`.
pub fn cache_folder() -> PathBuf {
    user_folder("XDG_CACHE_HOME", ".cache").unwrap_or_else(std::env::temp_dir).join("candlewick")
}

/// Returns the folder of histories: `$XDG_STATE_HOME/candlewick`, or `~/.local/state/candlewick`; `None` without a home.
pub fn state_folder() -> Option<PathBuf> {
    user_folder("XDG_STATE_HOME", ".local/state").map(|folder| folder.join("candlewick"))
}

/// Returns the folder of a variable, or a folder in the home folder.
fn user_folder(variable: &str, in_home: &str) -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    folder(variable).or_else(|| Some(folder("HOME")?.join(in_home)))
}

/// Returns the number of threads of one of `n` processes, of which this one has `available` cores.
///
/// `cores` are the numbers of cores in the process's CPU affinity and in the machine. Several processes may be bound to the
/// same subset of the cores, so none gets more than an equal part of the machine.
fn threads_per_process(n: usize, available: usize, cores: Option<(usize, usize)>) -> usize {
    let n_threads = match cores {
        Some((allowed, online)) if allowed < online => available.min(online / n),
        _ => available / n,
    };
    n_threads.max(1)
}

/// Counts the cores of a list such as `0-3,8`.
fn count(list: &str) -> Option<usize> {
    let of_range = |range: &str| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        (last.parse::<usize>().ok()? + 1).checked_sub(first.parse().ok()?)
    };
    list.trim().split(',').map(of_range).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cores_of_a_node_are_divided_among_its_processes() {
        // Not bound; limited to the CPU time of 8 cores; bound to one core; to a socket shared with another; to cores of its own.
        for (n, available, cores, want) in [
            (4, 64, Some((64, 64)), 16),
            (4, 8, Some((64, 64)), 2),
            (2, 1, Some((1, 64)), 1),
            (4, 32, Some((32, 64)), 16),
            (4, 16, Some((16, 64)), 16),
            (8, 2, Some((2, 2)), 1),
            (2, 8, None, 4),
        ] {
            assert_eq!(threads_per_process(n, available, cores), want, "{n} {available} {cores:?}");
        }
    }

    #[test]
    fn kernels_are_loaded_eagerly_with_several_ranks() {
        assert_eq!(module_loading(1, None), None);
        assert_eq!(module_loading(2, None), Some("EAGER"));
        assert_eq!(module_loading(2, Some("LAZY".into())), None);
    }

    #[test]
    fn a_variable_that_is_neither_1_nor_0_is_an_error_that_names_it() {
        let of = |value: &str| is_on("CANDLEWICK_GEMM_TUNE", Some(OsStr::new(value)));
        assert!(["", "0"].into_iter().all(|value| of(value).is_ok_and(|on| !on)));
        assert!(of("1").is_ok_and(|on| on) && is_on("X", None).is_ok_and(|on| !on));
        let error = of("yes").map_err(|error| error.to_string());
        assert_eq!(error, Err("CANDLEWICK_GEMM_TUNE=yes: expected 1 or 0".into()));
    }

    #[test]
    fn lists_of_cores_are_counted() {
        assert_eq!(["0-3,8\n", "\t5", "0-1,4-5", "", "3-1"].map(count), [Some(5), Some(1), Some(4), None, None]);
    }
}
