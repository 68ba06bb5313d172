//! NVIDIA libraries: their files, whether they can be loaded, and advice if one is missing.
//!
//! candle's cudarc loads them on first use and panics if one is missing, so this module looks for them first.

use std::path::PathBuf;

/// An NVIDIA library that a GPU run loads.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct NvidiaLibrary {
    /// Name, such as `cuBLAS`.
    pub name: &'static str,
    /// File from which it was loaded; `None` if it was not found.
    pub path: Option<PathBuf>,
    /// True if no GPU is usable without it.
    pub is_needed: bool,
}

/// A library by its file name, without the version suffix.
#[cfg(any(feature = "cuda", test))]
#[derive(Clone, Copy)]
struct File {
    name: &'static str,
    file: &'static str,
    /// PyPI packages that contain it, for CUDA 13 and 12; `None` if a device opens without it.
    needed: Option<[&'static str; 2]>,
}

/// Libraries that a run on a GPU loads.
///
/// candle opens a device with cuBLAS and cuRAND. cuBLAS loads cuBLASLt. cuDNN loads NVRTC, to compile kernels, and
/// CUDA's runtime library.
#[cfg(any(feature = "cuda", test))]
const FILES: [File; 8] = [
    File { name: "cuBLASLt", file: "libcublasLt.so", needed: Some(["nvidia-cublas", "nvidia-cublas-cu12"]) },
    File { name: "cuBLAS", file: "libcublas.so", needed: Some(["nvidia-cublas", "nvidia-cublas-cu12"]) },
    File { name: "cuRAND", file: "libcurand.so", needed: Some(["nvidia-curand", "nvidia-curand-cu12"]) },
    File { name: "cuDNN", file: "libcudnn.so", needed: None },
    File { name: "NVRTC", file: "libnvrtc.so", needed: None },
    File { name: "CUDA runtime", file: "libcudart.so", needed: None },
    File { name: "NCCL", file: "libnccl.so", needed: None },
    File { name: "NVML", file: "libnvidia-ml.so", needed: None },
];

/// Returns a message about missing required libraries, if any. `can_load` gets file names without versions.
#[cfg(any(feature = "cuda", test))]
fn missing_among(can_load: impl Fn(&str) -> bool) -> Option<String> {
    let missing = FILES.iter().filter(|library| library.needed.is_some() && !can_load(library.file));
    let missing: Vec<&File> = missing.collect();
    let [cuda_13, cuda_12] = missing.first()?.needed?;
    let names: Vec<String> = missing.iter().map(|File { name, file, .. }| format!("{name} ({file})")).collect();
    Some(format!(
        "there is a GPU, but {} cannot be loaded: install CUDA's libraries, or put their folder on LD_LIBRARY_PATH; pip's \
         {cuda_13} (or {cuda_12}) and torch bring them, in site-packages/nvidia/*/lib",
        names.join(" and ")
    ))
}

/// Returns a message about missing required libraries, if any. Found libraries stay loaded.
#[cfg(feature = "cuda")]
pub(crate) fn missing() -> Option<String> {
    static MISSING: std::sync::LazyLock<Option<String>> =
        std::sync::LazyLock::new(|| missing_among(|file| load(file).map(std::mem::forget).is_some()));
    MISSING.clone()
}

/// Lists the libraries that a GPU run loads, and looks for each. The list is empty in a build without CUDA.
pub fn nvidia_libraries() -> Vec<NvidiaLibrary> {
    #[cfg(feature = "cuda")]
    {
        let find = |File { name, file, needed }| NvidiaLibrary { name, path: path(file), is_needed: needed.is_some() };
        FILES.map(find).into()
    }
    #[cfg(not(feature = "cuda"))]
    Vec::new()
}

/// Folder given to [`tune_gemms`].
#[cfg(feature = "cuda")]
static TUNED_GEMMS: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();

/// Enables tuning of GEMMs on a GPU.
///
/// The first GEMM of each shape times cuBLASLt's algorithms. The fastest is stored in a file in `folder` for later
/// runs. Call this before any computation; later calls have no effect.
pub fn tune_gemms(folder: PathBuf) {
    #[cfg(feature = "cuda")]
    let _ = TUNED_GEMMS.set(folder);
    #[cfg(not(feature = "cuda"))]
    drop(folder);
}

#[cfg(feature = "cuda")]
pub(crate) fn tuned_gemms() -> Option<&'static std::path::Path> {
    TUNED_GEMMS.get().map(PathBuf::as_path)
}

/// Returns the version of NVIDIA's kernel driver, such as `580.65.06`; `unknown` where the kernel does not report it.
#[cfg(feature = "cuda")]
pub(crate) fn driver_version() -> String {
    let report = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    version_of(&report).unwrap_or("unknown").to_owned()
}

/// Returns the version in the kernel driver's report: the first number with a point.
#[cfg(any(feature = "cuda", test))]
fn version_of(report: &str) -> Option<&str> {
    let is_version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    report.lines().next()?.split_whitespace().find(is_version)
}

/// Loads an NVIDIA library under any of the major versions that cudarc looks for.
#[cfg(feature = "cuda")]
pub(crate) fn load(file: &str) -> Option<libloading::Library> {
    let endings = ["", ".13", ".12", ".11", ".10", ".9", ".2", ".1"];
    // SAFETY: NVIDIA's libraries may be loaded by any program.
    endings.iter().find_map(|ending| unsafe { libloading::Library::new(format!("{file}{ending}")) }.ok())
}

/// Loads a library and returns the path of its file.
#[cfg(feature = "cuda")]
fn path(file: &str) -> Option<PathBuf> {
    let _library = load(file)?;
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().filter_map(|line| line.split_once('/')).map(|(_, rest)| format!("/{rest}"));
    path.filter(|path| path.contains(file)).map(PathBuf::from).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_the_kernel_driver_is_read_from_its_report() {
        let proprietary = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12.2.0";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)";
        for (report, want) in
            [(proprietary, Some("535.104.05")), (open, Some("580.65.06")), ("", None), ("garbage\n1.2", None)]
        {
            assert_eq!(version_of(report), want, "{report}");
        }
    }

    #[track_caller]
    fn check(found: &[&str], want: Option<&[&str]>) {
        let message = missing_among(|file| found.contains(&file));
        match (&message, want) {
            (None, None) => {}
            (Some(message), Some(parts)) => parts.iter().for_each(|part| assert!(message.contains(part), "{message}")),
            _ => panic!("{found:?}: {message:?}"),
        }
    }

    #[test]
    fn the_libraries_that_candle_opens_a_device_with_are_required() {
        check(&["libcublas.so", "libcublasLt.so", "libcurand.so"], None);
        check(&["libcublas.so", "libcublasLt.so"], Some(&["but cuRAND (libcurand.so) cannot", "nvidia-curand-cu12"]));
        check(&["libcurand.so", "libcublasLt.so"], Some(&["but cuBLAS (libcublas.so)", "LD_LIBRARY_PATH"]));
        check(&["libcudnn.so"], Some(&["cuBLASLt (libcublasLt.so) and cuBLAS (libcublas.so) and cuRAND"]));
    }
}
