//! What a process computes with: how many cores if it has others beside it (the launcher decides it; for those that torchrun,
//! MPI or Slurm starts, it is decided here), which kernel, and when CUDA loads its kernels.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use candlewick_comm::CommBackend;

use crate::exit::ExitCode;
use crate::rank_env::rank_env;

/// The threads that any machine may start.
const MOST_THREADS: usize = 256;
/// What rayon and candle ask.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Takes this process's part of the cores, if it is one of several that were started together on this machine: as many threads
/// as it has cores of its own, or as is its share of all. RAYON_NUM_THREADS, if it is set, is left alone. Called before the
/// process has a second thread.
pub fn share_cores() {
    limit_threads();
    // A place that makes no sense is an error later.
    let n_processes = rank_env().map_or(1, |env| env.local_world_size);
    if n_processes < 2 || std::env::var_os(VARIABLE).is_some() {
        return;
    }
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let allowed = status.lines().find_map(|line| count(line.strip_prefix("Cpus_allowed_list:")?));
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok().and_then(|list| count(&list));
    let n_threads = share(n_processes, available, allowed.zip(online));
    // SAFETY: there is no other thread yet that could read the environment. candle asks this variable at every product, so
    // that no pool of ours could say it.
    unsafe { std::env::set_var(VARIABLE, n_threads.to_string()) };
}

/// Lowers an absurd RAYON_NUM_THREADS: to start 100,000 threads takes half a minute, and no machine has the cores.
fn limit_threads() {
    let Some(asked) = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<usize>().ok()) else { return };
    let most = MOST_THREADS.max(2 * std::thread::available_parallelism().map_or(1, usize::from));
    if asked > most {
        eprintln!("{VARIABLE}={asked}: {most} threads are started");
        // SAFETY: there is no other thread yet that could read the environment.
        unsafe { std::env::set_var(VARIABLE, most.to_string()) };
    }
}

/// Sets CUDA_MODULE_LOADING=EAGER if this process is one of several that NCCL may connect. CUDA otherwise loads a kernel at its
/// first launch, which may wait for all that the device does: for an operation of NCCL's that waits for another rank, which
/// may wait for this one. The variable, if it is set, is left alone. Called before the process has a second thread.
pub fn load_kernels_at_start() {
    const LOADING: &str = "CUDA_MODULE_LOADING";
    let n_ranks = rank_env().map_or(1, |env| env.world_size);
    if let Some(loading) = module_loading(n_ranks, std::env::var_os(LOADING)).filter(|_| CommBackend::HAS_NCCL) {
        // SAFETY: there is no other thread yet that could read the environment. The driver reads it when it is started.
        unsafe { std::env::set_var(LOADING, loading) };
    }
}

/// Returns the value that CUDA_MODULE_LOADING needs for one of `n_ranks` ranks, unless the user has set it.
fn module_loading(n_ranks: usize, of_user: Option<OsString>) -> Option<&'static str> {
    (n_ranks > 1 && of_user.is_none()).then_some("EAGER")
}

/// Selects the CPU kernel of f32 matmuls that CANDLEWICK_CPU_GEMM names, to reproduce the bits of another processor.
///
/// Call it before any computation. CANDLEWICK_CPU_GEMM, the variable's former name, is still read.
pub fn select_cpu_gemm_kernel() -> Result<()> {
    const VARIABLE: &str = "CANDLEWICK_CPU_GEMM";
    const FORMER: &str = "CANDLEWICK_CPU_PRODUCT";
    let former = || {
        let name = std::env::var_os(FORMER)?;
        eprintln!("note: {FORMER} is now called {VARIABLE}");
        Some(name)
    };
    let Some(name) = std::env::var_os(VARIABLE).or_else(former) else { return Ok(()) };
    let selected = candlewick_ops::select_cpu_gemm_kernel(&name.to_string_lossy());
    selected.map_err(anyhow::Error::from).context(format!("failed to heed {VARIABLE}")).context(ExitCode::Usage)
}

/// Lets the CUDA kernels in the folder that CANDLEWICK_KERNELS names replace those of this program. Called before anything is
/// computed.
pub fn choose_kernels() -> Result<()> {
    const KERNELS: &str = "CANDLEWICK_KERNELS";
    let Some(folder) = std::env::var_os(KERNELS).filter(|folder| !folder.is_empty()) else { return Ok(()) };
    let replaced = candlewick_ops::replace_kernels(folder.as_ref());
    replaced.map_err(anyhow::Error::from).context(format!("failed to heed {KERNELS}")).context(ExitCode::Usage)
}

/// Lets cuBLASLt's algorithms be timed if CANDLEWICK_GEMM_TUNE is 1, and keeps the fastest in the cache folder. Called before
/// anything is computed.
pub fn tune_gemms() -> Result<()> {
    const TUNE: &str = "CANDLEWICK_GEMM_TUNE";
    if is_on(TUNE, std::env::var_os(TUNE).as_deref()).context(ExitCode::Usage)? {
        candlewick_ops::tune_gemms(cache_folder().join("gemm"));
    }
    Ok(())
}

/// Reads a variable that is 1 or 0; unset and empty is 0.
fn is_on(name: &str, value: Option<&OsStr>) -> Result<bool> {
    match value.map(OsStr::to_string_lossy).as_deref() {
        None | Some("" | "0") => Ok(false),
        Some("1") => Ok(true),
        Some(other) => bail!("{name}={other}: want 1 or 0"),
    }
}

/// Returns the folder that keeps what later runs need not compute again: `$XDG_CACHE_HOME/candlewick`, or below `~/.cache`.
pub fn cache_folder() -> PathBuf {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    cache.unwrap_or_else(std::env::temp_dir).join("candlewick")
}

/// How many threads one of `n` processes computes on, of `available` cores. `cores` are those that the process is bound to and
/// those that the machine has: who is bound to fewer was given its part, but perhaps together with others.
fn share(n: usize, available: usize, cores: Option<(usize, usize)>) -> usize {
    let share = match cores {
        Some((allowed, online)) if allowed < online => available.min(online / n),
        _ => available / n,
    };
    share.max(1)
}

/// Counts a list such as `0-3,8`.
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
    fn processes_of_one_machine_share_its_cores() {
        // Not bound; in a container of 8 cores' time; bound to a core; to a socket with another; to their own.
        for (n, available, cores, want) in [
            (4, 64, Some((64, 64)), 16),
            (4, 8, Some((64, 64)), 2),
            (2, 1, Some((1, 64)), 1),
            (4, 32, Some((32, 64)), 16),
            (4, 16, Some((16, 64)), 16),
            (8, 2, Some((2, 2)), 1),
            (2, 8, None, 4),
        ] {
            assert_eq!(share(n, available, cores), want, "{n} {available} {cores:?}");
        }
    }

    #[test]
    fn kernels_are_loaded_at_start_where_ranks_may_wait_for_each_other() {
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
        assert_eq!(error, Err("CANDLEWICK_GEMM_TUNE=yes: want 1 or 0".into()));
    }

    #[test]
    fn lists_of_cores_are_counted() {
        assert_eq!(["0-3,8\n", "\t5", "0-1,4-5", "", "3-1"].map(count), [Some(5), Some(1), Some(4), None, None]);
    }
}
