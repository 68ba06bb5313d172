//! The air gap: an empty root file system without network and compiler. One archive is unpacked into it, with the folder of
//! `trainer prefetch`, both programs and their shared libraries.
//!
//! The test needs the right to create namespaces and to change the root. Otherwise it is skipped.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use suite::{program, read, report_skip};

use super::{MODEL, PrefetchFolder, succeeds};

/// The commands of docs/offline.md that pack the folder with the shared libraries.
const PACK: [&str; 2] =
    ["cp --parents $(ldd carry/trainer | grep -o '/[^ ]*\\.so[^ ]*') carry", "tar cf carry.tar carry"];

/// The command of docs/offline.md that unpacks the archive as a root file system.
const UNPACK: &str = "tar xf carry.tar --directory ROOT --strip-components 1";

/// A root file system without a network.
struct AirGap {
    root: PathBuf,
    /// The command that enters a network namespace.
    unshare: &'static [&'static str],
}

impl AirGap {
    /// Creates an empty root file system. The error is the reason why this machine does not support it.
    fn new(root: PathBuf) -> Result<Self, String> {
        const WAYS: [&[&str]; 2] = [&["unshare", "--map-root-user", "--net"], &["unshare", "--net"]];
        fs::create_dir(&root).unwrap();
        let mut why = String::new();
        for unshare in WAYS {
            let probe = Command::new(unshare[0]).args(&unshare[1..]).args(["chroot", "/", "true"]).output();
            match probe.map_err(|error| error.to_string()) {
                Ok(output) if output.status.success() => return Ok(Self { root, unshare }),
                Ok(output) => why = String::from_utf8_lossy(&output.stderr).into_owned(),
                Err(error) => why = error,
            }
        }
        Err(format!("{}: {why}", WAYS[0].join(" ")))
    }

    /// Runs a command line in the root. Words have no spaces.
    fn run(&self, line: &str) -> Output {
        self.run_with_input(line, "")
    }

    /// Runs a command line in the root with a text on stdin.
    fn run_with_input(&self, line: &str, input: &str) -> Output {
        let words: Vec<&str> = line.split(' ').collect();
        let mut command = Command::new(self.unshare[0]);
        command.args(&self.unshare[1..]).arg("chroot").arg(&self.root).arg(format!("/{}", words[0]));
        command.args(&words[1..]).env_clear().env("PATH", std::env::var("PATH").unwrap_or_default());
        // The Hub's public address, which cannot be reached here.
        command.env("HF_HOME", "hf-home").env("HF_HUB_OFFLINE", "1").env("HOME", "/tmp").env("RAYON_NUM_THREADS", "2");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // Only a chat reads its input.
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        child.wait_with_output().unwrap()
    }

    /// Returns the names in the root.
    fn names(&self) -> Vec<String> {
        names(&self.root)
    }
}

/// Returns the sorted names in a folder.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = entries.collect();
    names.sort();
    names
}

/// Runs a command line in the shell, in the folder of the recipe.
#[track_caller]
fn shell(here: &PrefetchFolder, line: &str) {
    let output = Command::new("sh").args(["-ec", line]).current_dir(here.folder.path()).output().unwrap();
    succeeds(line, &output);
}

/// Packs the folder, both programs and their shared libraries into one archive, as docs/offline.md does.
fn pack(here: &PrefetchFolder) {
    let page = read("docs/offline.md");
    PACK.iter().for_each(|line| assert!(page.contains(&format!("$ {line}\n")), "{line}"));
    assert!(page.contains(UNPACK), "{UNPACK}");
    succeeds("prefetch", &here.run("trainer prefetch recipe.yaml --output carry"));
    for name in ["trainer", "evaluator"] {
        fs::hard_link(fs::canonicalize(program(name)).unwrap(), here.path("carry").join(name)).unwrap();
    }
    PACK.iter().for_each(|line| shell(here, line));
}

/// Unpacks the archive into the empty root. The commands find nothing else there.
fn unpack(here: &PrefetchFolder, gap: &AirGap) {
    assert!(gap.names().is_empty());
    shell(here, &UNPACK.replace("ROOT", gap.root.to_str().unwrap()));
    assert_eq!(gap.names(), names(&here.path("carry")));
    for name in gap.names() {
        let is_system =
            ["bin", "dev", "etc", "home", "proc", "run", "sys", "tmp", "usr", "var"].contains(&name.as_str());
        assert!(!is_system, "{name}");
    }
    fs::remove_dir_all(here.path("carry")).unwrap();
    fs::remove_file(here.path("carry.tar")).unwrap();
}

#[test]
fn everything_runs_in_an_empty_root_without_network() {
    let here = PrefetchFolder::new();
    let gap = match AirGap::new(here.path("root")) {
        Ok(gap) => gap,
        Err(why) => return report_skip(&format!("this machine cannot create an air gap: {why}")),
    };
    pack(&here);
    unpack(&here, &gap);

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
    assert!(said.contains("read back"), "{said}");
    let said = succeeds("generate", &gap.run("trainer generate merged --prompt Why? --max-new-tokens 4"));
    assert!(!said.is_empty());
    let chat = gap.run_with_input("trainer chat merged --max-new-tokens 4", "Why?\nWho?\n/quit\n");
    let said = succeeds("chat", &chat);
    assert_eq!(said.matches(" tokens/s (prompt: ").count(), 2, "{said}");
    // A repository that the folder does not have is an error at once, without a wait for the network.
    let output = gap.run("trainer train recipe.yaml model.name_or_path=tiny/other");
    super::refused(&output, 2, &["recipe.yaml.lock has no entry for the model tiny/other"]);
}
