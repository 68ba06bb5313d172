//! Environment of a run: machine, system, program version and git commit.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

use candlewick_ops::why_no_gpu;

/// Returns lm-eval's `pretty_env_info`, one fact a line.
pub(crate) fn environment() -> String {
    let n_cores = thread::available_parallelism().map_or(0, usize::from);
    let gpu = why_no_gpu().map_or_else(|| "yes".to_owned(), |why| format!("no ({why})"));
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

/// What follows `key` in the first line of a file that begins with it; nothing where there is no such file.
fn of_file(path: &str, key: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().to_owned()
}

/// The commit that the working directory is at, by the shortest name that git has for it; `None` where git knows none.
pub(crate) fn git_hash() -> Option<String> {
    git(Path::new("."), &["describe", "--always"])
}

/// The commit of the folder above, if that is the top of a repository itself: this one may be a submodule of it.
pub(crate) fn upper_git_hash() -> Option<String> {
    let above = Path::new("..");
    if above.join(".git").exists() { git(above, &["rev-parse", "HEAD"]) } else { None }
}

fn git(folder: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("-C").arg(folder).args(arguments).output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !said.is_empty()).then_some(said)
}
