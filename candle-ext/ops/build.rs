//! Compiles the CUDA kernels: with the feature `cuda` one fatbin for each `src/*/kernel.cu`, with `emulate` one shared
//! library for the CPU. Without either it does nothing.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Ampere, with PTX for what comes after it, and Hopper's own instructions.
const ARCHITECTURES: [&str; 2] =
    ["-gencode=arch=compute_80,code=[sm_80,compute_80]", "-gencode=arch=compute_90a,code=sm_90a"];

fn main() {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=emulator");
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut kernels: Vec<PathBuf> = std::fs::read_dir("src")
        .expect("the package has a src folder")
        .flatten()
        .map(|entry| entry.path().join("kernel.cu"))
        .filter(|path| path.is_file())
        .collect();
    kernels.sort();
    for kernel in kernels {
        let name = kernel.parent().and_then(Path::file_name).expect("a kernel lies in an op's folder");
        if env::var_os("CARGO_FEATURE_CUDA").is_some() {
            compile(&nvcc(), &kernel, &out.join(name).with_extension("fatbin"));
        }
        if env::var_os("CARGO_FEATURE_EMULATE").is_some() {
            emulate(&kernel, &out.join(format!("lib{}.so", name.display())));
        }
    }
}

fn nvcc() -> PathBuf {
    let from_home = || Some(Path::new(&env::var_os("CUDA_HOME")?).join("bin/nvcc"));
    env::var_os("NVCC").map(PathBuf::from).or_else(from_home).unwrap_or_else(|| "nvcc".into())
}

fn compile(nvcc: &Path, kernel: &Path, fatbin: &Path) {
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xfatbin=-compress-all", "-Isrc/cuda"]);
    command.args(ARCHITECTURES).arg("-o").arg(fatbin).arg(kernel);
    run(command, "scripts/cuda-toolkit puts a compiler in place, or build without the cuda feature");
}

/// Compiles a kernel and what it needs of CUDA for this machine's processor.
fn emulate(kernel: &Path, library: &Path) {
    let mut command = Command::new(env::var_os("CXX").unwrap_or_else(|| "c++".into()));
    command.args([
        "-shared",
        "-fPIC",
        "-O2",
        "-std=c++17",
        "-fno-strict-aliasing",
        // Shared memory of one op must not be taken for that of another.
        "-fvisibility=hidden",
        "-U_FORTIFY_SOURCE",
        "-w",
        "-Iemulator",
        "-Isrc/cuda",
    ]);
    command.arg("-o").arg(library).args(["-x", "c++", "emulator/emulator.cpp"]).arg(kernel);
    run(command, "it needs a C++ compiler (CXX)");
}

fn run(mut command: Command, advice: &str) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("failed to compile: {command:?} ended with {status}"),
        Err(error) => panic!("failed to run {command:?}: {error}; {advice}"),
    }
}
