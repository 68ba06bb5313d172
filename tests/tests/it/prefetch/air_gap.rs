//! The air gap: an empty root file system without network and compiler, which holds one folder of `trainer prefetch` and both
//! programs with their shared libraries.
//!
//! The test needs the right to create namespaces and to change the root. Otherwise it is skipped.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use suite::program;

use super::{MODEL, PrefetchFolder, succeeds};

const PROGRAMS: [&str; 2] = ["trainer", "evaluator"];

/// An empty root file system, without a network.
struct AirGap {
    root: PathBuf,
    /// The command that enters a network namespace.
    unshare: &'static [&'static str],
}

impl AirGap {
    /// Creates the root file system from a folder. The error is the reason why this machine does not support it.
    fn new(root: PathBuf) -> Result<Self, String> {
        const WAYS: [&[&str]; 2] = [&["unshare", "--map-root-user", "--net"], &["unshare", "--net"]];
        let mut why = String::new();
        for unshare in WAYS {
            let probe = Command::new(unshare[0]).args(&unshare[1..]).args(["chroot", "/", "true"]).output();
            match probe.map_err(|error| error.to_string()) {
                Ok(output) if output.status.success() => return Self { root, unshare }.with_programs(),
                Ok(output) => why = String::from_utf8_lossy(&output.stderr).into_owned(),
                Err(error) => why = error,
            }
        }
        Err(format!("{}: {why}", WAYS[0].join(" ")))
    }

    /// Links both programs and the shared libraries that they name into the root.
    fn with_programs(self) -> Result<Self, String> {
        for name in PROGRAMS {
            let program = program(name);
            place(&program, &self.root.join("bin").join(name));
            let output = Command::new("ldd").arg(&program).output().map_err(|error| format!("ldd: {error}"))?;
            let listed = String::from_utf8_lossy(&output.stdout).into_owned();
            let libraries = listed.split_whitespace().filter(|word| word.starts_with('/'));
            libraries.for_each(|library| place(Path::new(library), &self.root.join(&library[1..])));
        }
        fs::create_dir_all(self.root.join("tmp")).unwrap();
        Ok(self)
    }

    /// Runs a command line in the root, in the folder of the recipe. Words have no spaces.
    fn run(&self, line: &str) -> Output {
        let words: Vec<&str> = line.split(' ').collect();
        let mut command = Command::new(self.unshare[0]);
        command.args(&self.unshare[1..]).arg("chroot").arg(&self.root).arg(format!("/bin/{}", words[0]));
        command.args(&words[1..]).env_clear().env("PATH", std::env::var("PATH").unwrap_or_default());
        // The Hub's public address, which cannot be reached here.
        command.env("HF_HOME", "hf-home").env("HF_HUB_OFFLINE", "1").env("HOME", "/tmp").env("RAYON_NUM_THREADS", "2");
        command.output().unwrap()
    }

    /// Returns the names in the root.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.root).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = entries.collect();
        names.sort();
        names
    }
}

/// Links or copies a file, with what its links lead to.
fn place(from: &Path, to: &Path) {
    let from = fs::canonicalize(from).unwrap();
    fs::create_dir_all(to.parent().unwrap()).unwrap();
    if !to.exists() && fs::hard_link(&from, to).is_err() {
        fs::copy(&from, to).unwrap();
    }
}

#[test]
fn everything_runs_in_an_empty_root_without_network() {
    let here = PrefetchFolder::new();
    succeeds("prefetch", &here.run("trainer prefetch recipe.yaml --output carry"));
    let gap = match AirGap::new(here.path("carry")) {
        Ok(gap) => gap,
        Err(why) => return eprintln!("skipped: this machine cannot create an air gap: {why}"),
    };
    let names = gap.names();
    let is_system = |name: &String| ["dev", "etc", "home", "proc", "run", "sys", "var"].contains(&name.as_str());
    assert!(!names.iter().any(is_system), "{names:?}");

    let said = succeeds("check", &gap.run("trainer prefetch recipe.yaml --check"));
    assert!(said.contains("are whole, in hf-home/hub"), "{said}");
    let said = succeeds("train", &gap.run("trainer train recipe.yaml"));
    assert!(said.contains("recipe.yaml.lock is in use"), "{said}");
    assert!(gap.root.join("runs/lora/run.json").is_file());
    let run = "evaluator run --lock recipe.yaml.lock --tasks arc_easy --limit 2 --max-length 128 --model";
    for model in ["runs/lora", MODEL] {
        let said = succeeds("evaluate", &gap.run(&format!("{run} {model}")));
        assert!(said.contains("arc_easy"), "{said}");
    }
    succeeds("merge", &gap.run("trainer merge runs/lora --output merged"));
    assert!(gap.root.join("merged/model.safetensors").is_file());
    let said = succeeds("export", &gap.run("trainer export merged --format gguf-q8_0 --output gguf"));
    assert!(said.contains("checked by"), "{said}");
    let said = succeeds("generate", &gap.run("trainer generate merged --prompt Why? --max-new-tokens 4"));
    assert!(!said.is_empty());
    // A repository that the folder does not have is an error at once, without a wait for the network.
    let output = gap.run("trainer train recipe.yaml model.name_or_path=tiny/other");
    super::refused(&output, 2, &["recipe.yaml.lock has no entry for the model tiny/other"]);
}
