//! Damaged and hostile input files. Each program exits in time and in bounded memory, with the exit code of its kind of
//! input and an error that names the file. Add a row to [`table::FILES`] for each new input file; the test applies every
//! row of [`damage::EVERY`] to it. [`answers`] has hostile answers of servers, [`requests`] hostile requests to ours.

mod answers;
mod caches;
mod damage;
pub(crate) mod folder;
mod requests;
mod table;

use std::process::Output;

use damage::{Damage, EVERY};
use folder::Folder;
use table::{Attack, FILES, File};

/// Returns the fault of a program that did not refuse its input properly.
fn fault_of(output: Result<Output, String>, codes: &[i32], words: &[&str]) -> Option<String> {
    let output = match output {
        Ok(output) => output,
        Err(fault) => return Some(fault),
    };
    let stderr = String::from_utf8_lossy(&output.stderr);
    let has_code = output.status.code().is_some_and(|code| codes.contains(&code));
    let missing = words.iter().find(|word| !stderr.contains(**word));
    let fault = match missing {
        _ if stderr.contains("panicked at") => "it panicked".to_owned(),
        _ if !has_code => format!("{}, expected {codes:?}", output.status),
        Some(word) => format!("{word:?} is not in the error"),
        None => return None,
    };
    Some(format!("{fault}\n{}", stderr.chars().take(2000).collect::<String>()))
}

#[track_caller]
fn report(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n---\n"));
}

fn check_file(folder: &Folder, file: &File) -> Vec<String> {
    let damages = EVERY.iter().filter(|damage| !file.harmless.contains(&damage.name()));
    let check = |damage: &Damage| {
        folder.restore();
        damage.apply(&folder.path(file.path));
        let name = file.path.rsplit('/').next()?;
        let fault = fault_of(folder.run(file.command), file.codes, &[name])?;
        Some(format!("{} {}: {fault}", file.path, damage.name()))
    };
    damages.filter_map(check).collect()
}

fn check_attack(folder: &Folder, attack: &Attack) -> Option<String> {
    folder.restore();
    (attack.apply)(&folder.path(attack.path));
    let fault = fault_of(folder.run(attack.command), &[attack.code], attack.words)?;
    Some(format!("{}: {fault}", attack.name))
}

#[test]
fn hostile_folder_is_sound_before_it_is_damaged() {
    let folder = Folder::new();
    for command in table::commands() {
        let output = folder.run(command).unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {}\n{stderr}", output.status);
    }
}

macro_rules! hostile_files {
    ($($test:ident: $group:expr;)*) => {
        $(#[test]
        fn $test() {
            let files: Vec<_> = FILES.iter().filter(|file| file.group == $group).collect();
            assert!(!files.is_empty(), "no file is in {}", $group);
            let folder = Folder::new();
            report(&files.into_iter().flat_map(|file| check_file(&folder, file)).collect::<Vec<_>>());
        })*
    };
}

hostile_files! {
    hostile_model_files_are_refused: "model";
    hostile_adapter_files_are_refused: "adapter";
    hostile_data_files_are_refused: "data";
    hostile_recipes_are_refused: "recipe";
    hostile_task_files_are_refused: "task";
}

#[test]
fn hostile_contents_are_refused() {
    let folder = Folder::new();
    let attacks = table::ATTACKS.iter().chain(caches::ATTACKS);
    report(&attacks.filter_map(|attack| check_attack(&folder, attack)).collect::<Vec<_>>());
}

#[test]
fn hostile_byte_order_marks_are_skipped() {
    let folder = Folder::new();
    for name in ["config", "generation_config", "tokenizer", "tokenizer_config"] {
        let path = folder.path(&format!("model/{name}.json"));
        std::fs::write(&path, [b"\xef\xbb\xbf", &std::fs::read(&path).unwrap()[..]].concat()).unwrap();
    }
    for command in table::commands() {
        let output = folder.run(command).unwrap();
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn hostile_memory_limit_is_exit_code_4() {
    let folder = Folder::new();
    let words = ["evaluator", "generate", "--model", "model", "--prompt", "Say yes."];
    // From too little memory for the model to enough: a failure of any allocation or thread start ends with code 4.
    let faults: Vec<_> = (100_000..=400_000)
        .step_by(2_500)
        .filter_map(|memory| {
            let output = folder.run_within(&memory.to_string(), &words);
            let fits = output.as_ref().is_ok_and(|output| output.status.success());
            if fits { None } else { fault_of(output, &[4], &["memory"]).map(|fault| format!("{memory} KiB: {fault}")) }
        })
        .collect();
    report(&faults);
}

#[test]
fn hostile_number_of_threads_is_lowered() {
    let folder = Folder::new();
    let mut command = std::process::Command::new(suite::program("evaluator"));
    command.args(["score", "--model", "model", "--text", "Say yes."]).current_dir(folder.path(""));
    let output = command.env("RAYON_NUM_THREADS", "100000").env("HF_HUB_OFFLINE", "1").output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && stderr.contains("RAYON_NUM_THREADS=100000 exceeds the limit of 256 threads"),
        "{stderr}"
    );
}
