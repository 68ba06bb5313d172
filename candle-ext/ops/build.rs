//! Compiles the CUDA kernels. The feature `cuda` builds one fatbin per `src/*/kernel.cu`, `emulate` one shared library
//! for the CPU, `cudnn` the C++ that calls cuDNN. Without these features nothing is built. scripts/build-cutlass compiles the
//! grouped GEMMs of CUTLASS, which a program loads.
//!
//! With kernels it also writes a table of their declarations: threads per block and parameter classes. The C++
//! compiler's preprocessor (CXX) expands the macros for it.
//!
//! The C++ for cuDNN needs the headers of cuDNN and cudnn-frontend, in the folders of CANDLEWICK_CUDA_HEADERS, which
//! `scripts/cuda-toolkit --headers` sets. If the variable is empty, that code is left out: the types can be checked, but no
//! program can be linked.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use parse::Declared;

#[path = "src/cuda/class.rs"]
mod class;
#[path = "build/parse.rs"]
mod parse;

fn main() {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=emulator");
    println!("cargo::rerun-if-changed=nvcc.options");
    println!("cargo::rerun-if-env-changed=CXX");
    println!("cargo::rerun-if-env-changed=NVCC");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");
    println!("cargo::rerun-if-env-changed=CANDLEWICK_CUDA_HEADERS");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let [cuda, emulated] = ["CARGO_FEATURE_CUDA", "CARGO_FEATURE_EMULATE"].map(|name| env::var_os(name).is_some());
    if cuda {
        println!("cargo::rustc-env=CANDLEWICK_CUDA_RELEASE={}", release(&nvcc()));
    }
    let emulator = emulated.then(|| emulator(&out));
    for op in ops_with_kernels().iter().filter(|_| cuda || emulated) {
        let kernel = Path::new("src").join(op).join("kernel.cu");
        if cuda {
            compile(&nvcc(), &kernel, &out.join(op).with_extension("fatbin"));
        }
        declare(op, &kernel, emulator.as_deref(), &out);
    }
    if emulated {
        // Kernels that test the emulator.
        declare("faulty", Path::new("emulator/faulty.cu"), emulator.as_deref(), &out);
    }
    if let Some(folders) = cudnn_headers() {
        cudnn(&folders, &out);
        link_cxx_library();
    }
}

/// Writes the table of an op's kernels. Also builds the library of emulated ones, if there is an emulator.
fn declare(op: &str, kernel: &Path, emulator: Option<&Path>, out: &Path) {
    let source = preprocessed(kernel);
    let kernels = parse::kernels(&source).unwrap_or_else(|error| panic!("{}: {error}", kernel.display()));
    write(&out.join(op).with_extension("rs"), &table(&kernels));
    if let Some(emulator) = emulator {
        let object = emulated(op, kernel, &kernels, &source, out);
        link_emulated(&object, emulator, &out.join(format!("lib{op}.so")));
    }
}

/// Returns the folders of cuDNN's headers, unless the feature is off or the variable is empty.
fn cudnn_headers() -> Option<String> {
    const VARIABLE: &str = "CANDLEWICK_CUDA_HEADERS";
    env::var_os("CARGO_FEATURE_CUDNN")?;
    let missing = |_| panic!("{VARIABLE}: scripts/cuda-toolkit --headers sets it, or build without the cudnn feature");
    Some(env::var(VARIABLE).unwrap_or_else(missing)).filter(|folders| !folders.is_empty())
}

/// Lists the folders of `src` that have a `kernel.cu`.
fn ops_with_kernels() -> Vec<String> {
    let folders = fs::read_dir("src").expect("the package has a src folder").flatten();
    let with_kernels = folders.filter(|folder| folder.path().join("kernel.cu").is_file());
    let mut ops: Vec<String> = with_kernels.filter_map(|folder| folder.file_name().into_string().ok()).collect();
    ops.sort();
    ops
}

/// Returns the source of kernels with all macros expanded.
fn preprocessed(kernel: &Path) -> String {
    let mut command = cxx();
    command.args(["-E", "-P", "-std=c++17", "-DCANDLEWICK_PREPROCESS", "-Iemulator", "-Isrc/cuda", "-x", "c++"]);
    let output =
        command.arg(kernel).output().unwrap_or_else(|error| panic!("failed to run {command:?}: {error}; {CXX}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "failed to preprocess: {command:?} ended with {}: {said}", output.status);
    String::from_utf8(output.stdout).unwrap_or_else(|error| panic!("{}: {error}", kernel.display()))
}

/// Returns an array of `Signature`, which the op's `kernels!` macro includes.
fn table(kernels: &[Declared]) -> String {
    let entry = |kernel: &Declared| {
        let Declared { name, max_threads, parameters } = kernel;
        format!("    Signature {{ name: {name:?}, max_threads: {max_threads}, parameters: &{parameters:?} }},\n")
    };
    format!("&[\n{}]\n", kernels.iter().map(entry).collect::<String>())
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("failed to read {}: {error}", path.display()))
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|error| panic!("failed to write {}: {error}", path.display()));
}

fn cxx() -> Command {
    Command::new(env::var_os("CXX").unwrap_or_else(|| "c++".into()))
}

fn nvcc() -> PathBuf {
    let from_home = || Some(Path::new(&env::var_os("CUDA_HOME")?).join("bin/nvcc"));
    env::var_os("NVCC").map(PathBuf::from).or_else(from_home).unwrap_or_else(|| "nvcc".into())
}

const CXX: &str = "it needs a C++ compiler (CXX)";
const ADVICE: &str = "scripts/cuda-toolkit puts a compiler in place, or build without the cuda feature";

/// Returns the CUDA release of a compiler: 13000 is 13.0.
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
    // scripts/build-kernels takes the same options.
    command.args(["-fatbin", "--options-file", "nvcc.options", "-Isrc/cuda", "-o"]).arg(fatbin).arg(kernel);
    let folders = [kernel.parent().expect("a kernel is in an op's folder"), Path::new("src/cuda")];
    let mut inputs: Vec<PathBuf> = folders.iter().flat_map(|folder| cuda_sources(folder)).collect();
    inputs.push("nvcc.options".into());
    let inputs: Vec<String> = inputs.iter().map(|path| read(path)).collect();
    run_if_new(command, fatbin, &format!("{}\n{inputs:?}", release(nvcc)), ADVICE);
}

/// Lists the CUDA sources of a folder.
fn cuda_sources(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).expect("the folder is in the package").flatten().map(|file| file.path());
    let mut sources: Vec<PathBuf> =
        files.filter(|file| file.extension().is_some_and(|ending| ending == "cu" || ending == "cuh")).collect();
    sources.sort();
    sources
}

/// Options of C++ that is part of emulated kernels. One op's shared memory must not be confused with another's: symbols are
/// hidden.
const EMULATED: [&str; 8] = [
    "-c",
    "-fPIC",
    "-O2",
    "-std=c++17",
    "-fno-strict-aliasing",
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",
    "-Iemulator",
];

/// Compiles the emulator for this machine's processor, unless the output is up to date. Returns the object file.
fn emulator(out: &Path) -> PathBuf {
    let object = out.join("emulator.o");
    let mut command = cxx();
    command.args(EMULATED).arg("-o").arg(&object).arg("emulator/emulator.cpp");
    let inputs = ["emulator.h", "emulator.cpp"].map(|file| read(&Path::new("emulator").join(file)));
    run_if_new(command, &object, &inputs.concat(), CXX);
    object
}

/// Compiles an op's kernels for the emulator, unless the output is up to date. Returns the object file.
fn emulated(op: &str, kernel: &Path, kernels: &[Declared], source: &str, out: &Path) -> PathBuf {
    let calls = out.join(format!("emulated_{op}.cpp"));
    let path = fs::canonicalize(kernel).expect("the source is in the package");
    let mut text = format!("#include {path:?}\n#include <call.h>\n");
    for Declared { name, parameters, .. } in kernels {
        let classes: Vec<String> = parameters.iter().map(|class| format!("Class::{class:?}")).collect();
        text += &format!("CALL({name}, {})\n", classes.join(", "));
    }
    if fs::read_to_string(&calls).ok().as_ref() != Some(&text) {
        write(&calls, &text);
    }
    let object = calls.with_extension("o");
    let mut command = cxx();
    command.args(EMULATED).args(["-Isrc/cuda", "-w"]);
    // The emulator has the function that reports a misaligned access, in place of the sanitizer's library.
    command.args(["-fsanitize=alignment", "-fno-sanitize-recover=alignment"]);
    command.arg("-o").arg(&object).arg(&calls);
    run_if_new(command, &object, &format!("{text}\n{}\n{source}", read(Path::new("emulator/call.h"))), CXX);
    object
}

/// Links an op's kernels with the emulator, unless the output is up to date.
fn link_emulated(kernels: &Path, emulator: &Path, library: &Path) {
    let mut command = cxx();
    command.arg("-shared").arg("-o").arg(library).args([kernels, emulator]);
    let inputs = [kernels, emulator].map(|object| read(&object.with_extension("stamp")));
    run_if_new(command, library, &inputs.concat(), CXX);
}

/// Compiles the C++ that calls cuDNN and links it statically.
fn cudnn(folders: &str, out: &Path) {
    let source = Path::new("src/attention/cudnn.cpp");
    let object = out.join("cudnn.o");
    let mut command = cxx();
    command.args(["-c", "-O2", "-std=c++20", "-fPIC", "-DNV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING"]);
    let cuda = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("include"));
    for folder in folders.split(':').map(PathBuf::from).chain(cuda) {
        command.arg("-isystem").arg(folder);
    }
    command.arg("-o").arg(&object).arg(source);
    run_if_new(command, &object, &read(source), CXX);
    link(&object, "candlewick_cudnn", out);
}

/// Packs an object into a static library, and links it.
fn link(object: &Path, name: &str, out: &Path) {
    let archive = out.join(format!("lib{name}.a"));
    let _ = fs::remove_file(&archive);
    let mut pack = Command::new("ar");
    pack.arg("crs").arg(&archive).arg(object);
    run(pack, "it needs binutils");
    println!("cargo::rustc-link-search=native={}", out.display());
    println!("cargo::rustc-link-lib=static={name}");
}

/// Links the C++ library statically. The program then does not need it at run time.
fn link_cxx_library() {
    let found = cxx().arg("-print-file-name=libstdc++.a").output().unwrap_or_else(|error| panic!("{error}; {CXX}"));
    let library = PathBuf::from(String::from_utf8_lossy(&found.stdout).trim());
    let folder = library.parent().filter(|_| library.is_absolute()).expect("the compiler has a static libstdc++.a");
    println!("cargo::rustc-link-search=native={}", folder.display());
    println!("cargo::rustc-link-lib=static=stdc++");
}

/// Runs a compiler unless `output` exists and was made by the same command from the same inputs.
///
/// Some compilations take over a minute, and this script runs again when any source of the package changes.
fn run_if_new(command: Command, output: &Path, inputs: &str, advice: &str) {
    let stamp = output.with_extension("stamp");
    let wanted = format!("{command:?}\n{inputs}");
    if !output.exists() || fs::read_to_string(&stamp).ok().as_ref() != Some(&wanted) {
        run(command, advice);
        write(&stamp, &wanted);
    }
}

fn run(mut command: Command, advice: &str) {
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => panic!("failed to compile: {command:?} ended with {status}"),
        Err(error) => panic!("failed to run {command:?}: {error}; {advice}"),
    }
}
