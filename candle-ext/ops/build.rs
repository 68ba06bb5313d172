//! Compiles the CUDA kernels: with the feature `cuda` one fatbin for each `src/*/kernel.cu`, with `emulate` one shared
//! library for the CPU; and with `cudnn` the C++ that calls cuDNN. Without any of them it does nothing.
//!
//! The C++ needs the headers of cuDNN and its frontend, in the folders of CANDLEWICK_CUDA_HEADERS, which
//! `scripts/cuda-toolkit --headers` sets. Where that is set to nothing, the C++ is left out: types can be checked, but no
//! program can be linked.

use std::env;
use std::fs;
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
    println!("cargo::rerun-if-env-changed=CANDLEWICK_CUDA_HEADERS");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let mut kernels: Vec<PathBuf> = std::fs::read_dir("src")
        .expect("the package has a src folder")
        .flatten()
        .map(|entry| entry.path().join("kernel.cu"))
        .filter(|path| path.is_file())
        .collect();
    kernels.sort();
    if env::var_os("CARGO_FEATURE_CUDA").is_some() {
        println!("cargo::rustc-env=CANDLEWICK_CUDA_RELEASE={}", release(&nvcc()));
    }
    for kernel in kernels {
        let name = kernel.parent().and_then(Path::file_name).expect("a kernel lies in an op's folder");
        if env::var_os("CARGO_FEATURE_CUDA").is_some() {
            compile(&nvcc(), &kernel, &out.join(name).with_extension("fatbin"));
        }
        if env::var_os("CARGO_FEATURE_EMULATE").is_some() {
            emulate(&kernel, &out.join(format!("lib{}.so", name.display())));
        }
    }
    if env::var_os("CARGO_FEATURE_CUDNN").is_some() {
        let advice = "scripts/cuda-toolkit --headers sets it, or build without the cudnn feature";
        let folders =
            env::var("CANDLEWICK_CUDA_HEADERS").unwrap_or_else(|_| panic!("CANDLEWICK_CUDA_HEADERS: {advice}"));
        if !folders.is_empty() {
            cudnn(&folders, &out);
        }
    }
}

fn nvcc() -> PathBuf {
    let from_home = || Some(Path::new(&env::var_os("CUDA_HOME")?).join("bin/nvcc"));
    env::var_os("NVCC").map(PathBuf::from).or_else(from_home).unwrap_or_else(|| "nvcc".into())
}

const ADVICE: &str = "scripts/cuda-toolkit puts a compiler in place, or build without the cuda feature";

/// The release of CUDA that a compiler belongs to: 13000 is 13.0.
fn release(nvcc: &Path) -> u32 {
    let said = Command::new(nvcc)
        .arg("--version")
        .output()
        .unwrap_or_else(|error| panic!("{}: {error}; {ADVICE}", nvcc.display()));
    let said = String::from_utf8_lossy(&said.stdout);
    let number = || {
        let (major, rest) = said.split_once("release ")?.1.split_once('.')?;
        let minor: String = rest.chars().take_while(char::is_ascii_digit).collect();
        Some(1000 * major.parse::<u32>().ok()? + 10 * minor.parse::<u32>().ok()?)
    };
    number().unwrap_or_else(|| panic!("{} --version names no release: {said}", nvcc.display()))
}

fn compile(nvcc: &Path, kernel: &Path, fatbin: &Path) {
    let mut command = Command::new(nvcc);
    command.args(["-fatbin", "-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xfatbin=-compress-all", "-Isrc/cuda"]);
    command.args(ARCHITECTURES).arg("-o").arg(fatbin).arg(kernel);
    run(command, ADVICE);
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

/// Compiles the C++ that calls cuDNN, and links it with the C++ library, both statically: the program then needs neither
/// to start.
fn cudnn(folders: &str, out: &Path) {
    let source = Path::new("src/attention/cudnn.cpp");
    let compiler = env::var_os("CXX").unwrap_or_else(|| "c++".into());
    let (object, stamp) = (out.join("cudnn.o"), out.join("cudnn.command"));
    let mut command = Command::new(&compiler);
    command.args(["-c", "-O2", "-std=c++20", "-fPIC", "-DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING"]);
    let cuda = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("include"));
    for folder in folders.split(':').map(PathBuf::from).chain(cuda) {
        command.arg("-isystem").arg(folder);
    }
    command.arg("-o").arg(&object).arg(source);
    // It takes over a minute, and this script runs again whenever any source of the package changes.
    let wanted = format!("{command:?}\n{}", fs::read_to_string(source).expect("the source is in the package"));
    if !object.exists() || fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
        run(command, "it needs a C++ compiler (CXX)");
        fs::write(&stamp, wanted).expect("OUT_DIR can be written to");
    }
    let archive = out.join("libcandlewick_cudnn.a");
    let _ = fs::remove_file(&archive);
    let mut pack = Command::new("ar");
    pack.arg("crs").arg(&archive).arg(&object);
    run(pack, "it needs binutils");
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static=candlewick_cudnn");
    let found = Command::new(&compiler).arg("-print-file-name=libstdc++.a").output().expect("it has just compiled");
    let library = PathBuf::from(String::from_utf8_lossy(&found.stdout).trim());
    let folder = library.parent().filter(|_| library.is_absolute()).expect("the compiler has a static libstdc++.a");
    println!("cargo::rustc-link-search=native={}", folder.display());
    println!("cargo::rustc-link-lib=static=stdc++");
}

fn run(mut command: Command, advice: &str) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("failed to compile: {command:?} ended with {status}"),
        Err(error) => panic!("failed to run {command:?}: {error}; {advice}"),
    }
}
