//! Environment of a run: machine, operating system, program version and git commit.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use candlewick_ops::gpu_unavailable_reason;

/// Returns lm-eval's `pretty_env_info`: one `name: value` pair a line.
pub(crate) fn pretty_env_info() -> String {
    let n_cores = thread::available_parallelism().map_or(0, usize::from);
    let gpu = gpu_unavailable_reason().map_or_else(|| "yes".to_owned(), |why| format!("no ({why})"));
    let facts = [
        ("Candlewick version", env!("CARGO_PKG_VERSION").to_owned()),
        ("OS", of_file("/etc/os-release", "PRETTY_NAME=").trim_matches('"').to_owned()),
        ("Platform", format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH)),
        ("CPU", of_file("/proc/cpuinfo", "model name").trim_start_matches([' ', '\t', ':']).to_owned()),
        ("Cores for this process", n_cores.to_string()),
        ("GPU", gpu),
    ];
    let known = facts.iter().filter(|(_, fact)| !fact.is_empty());
    known.map(|(name, fact)| format!("{name}: {fact}")).collect::<Vec<_>>().join("\n")
}

/// Returns the rest of the first line that starts with `key`; empty if the file cannot be read.
fn of_file(path: &str, key: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().to_owned()
}

/// Returns the git commit of the working directory, as `git describe --always` prints it.
pub(crate) fn git_hash() -> Option<String> {
    git(Path::new("."), &["describe", "--always"])
}

/// Returns the git commit of the parent folder if it is a repository's root, for a working directory that is a
/// submodule.
pub(crate) fn upper_git_hash() -> Option<String> {
    let above = Path::new("..");
    if above.join(".git").exists() { git(above, &["rev-parse", "HEAD"]) } else { None }
}

fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !said.is_empty()).then_some(said)
}
