//! Folders that a run writes, and folders of others that it keeps.

use std::fs::{self, File};
use std::path::Path;
use std::process::Output;

use candlewick_model::BASE_MODEL_RECORD;

use crate::support::{Run, stderr};

/// Checks that a run fails before its first step, with `code` and these words.
#[track_caller]
fn refused(run: &Run, overrides: &[&str], code: i32, words: &[&str]) {
    let output = run.train(overrides);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{said}");
    words.iter().for_each(|word| assert!(said.contains(word), "no {word:?} in:\n{said}"));
    assert!(!said.contains("Train iter"), "it trained:\n{said}");
}

#[track_caller]
fn succeeds(output: &Output, words: &[&str]) {
    let text = stderr(output);
    assert!(output.status.success(), "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "no {word:?} in:\n{text}"));
}

fn steps(run: &Run, folder: &str) -> Vec<usize> {
    run.exports(folder).into_iter().map(|(step, _)| step).collect()
}

#[test]
fn a_recipe_without_a_checkpoint_exports_its_model_at_the_end() {
    let run = Run::new();
    let output = run.train(&["checkpoint=null", "train_iters=2"]);
    succeeds(&output, &["note: the model will be saved in", "will save: huggingface in", "the model is in"]);
    assert_eq!(steps(&run, "run/model"), [2]);
    assert!(run.path().join("run/model/global_step_2/model.safetensors").is_file());
    let none = Run::new();
    let output = none.train(&["checkpoint=none", "train_iters=2"]);
    succeeds(&output, &["note: nothing will be saved", "nothing was saved: the run has no checkpoint"]);
    assert!(!none.path().join("run/model").exists());
}

#[test]
fn a_signal_to_a_run_without_a_checkpoint_saves_one_to_resume() {
    let run = Run::new();
    let mut started = run.start_training(&["checkpoint=null", "train_iters=100000"]);
    started.wait_for("Train iter: 2/");
    started.send(libc::SIGINT);
    let (code, log) = started.finish();
    assert!(log.contains("stopped by SIGINT: checkpoint saved in"), "{log}");
    assert_eq!((code, steps(&run, "run/model").len()), (Some(75), 0));
}

#[test]
fn exports_of_an_earlier_run_are_moved_aside() {
    let run = Run::new();
    succeeds(&run.train(&["checkpoint=null", "train_iters=4"]), &[]);
    let output = run.train(&["checkpoint=null", "train_iters=2"]);
    succeeds(&output, &["moved 1 checkpoint of other runs to", "run/model/run.1"]);
    assert_eq!(steps(&run, "run/model"), [2]);
    assert_eq!(steps(&run, "run/model/run.1"), [4]);
}

#[test]
fn save_total_limit_deletes_checkpoints_of_the_run_and_logs_it() {
    let run = Run::new();
    run.write_foreign("hf/global_step_2/thesis.txt");
    run.write_foreign("checkpoints/epoch_0_global_step_1/thesis.txt");
    let keep = [
        "checkpoint.0.save_total_limit=1",
        "checkpoint.0.auto_resume=false",
        "checkpoint.0.save_every_n_steps=3",
        "checkpoint.1.save_total_limit=1",
        "checkpoint.1.save_every_n_steps=3",
        "train_iters=6",
    ];
    let output = run.train(&keep);
    succeeds(
        &output,
        &["deleted", "hf/global_step_3 (save_total_limit)", "checkpoints/epoch_0_global_step_3 (save_total_limit)"],
    );
    assert_eq!(steps(&run, "hf"), [2, 6]);
    assert!(run.path().join("hf/global_step_2/thesis.txt").exists());
    assert!(run.path().join("checkpoints/epoch_0_global_step_1/thesis.txt").exists());
}

#[test]
fn a_copied_checkpoint_starts_a_new_run() {
    let run = Run::new();
    let exports =
        ["checkpoint.1.save_every_n_steps=2", "checkpoint.1.save_total_limit=1", "checkpoint.0.save_every_n_steps=2"];
    run.train_ok(&[exports[0], exports[2], "train_iters=4"]);
    assert_eq!(steps(&run, "hf"), [2, 4]);
    copy(&run.path().join("checkpoints"), &run.path().join("copy"));
    let elsewhere = format!("checkpoint.0.output_dir={}", run.path().join("copy").display());
    for train_iters in ["train_iters=6", "train_iters=8"] {
        run.train_ok(&[&exports[..], &[&elsewhere, "checkpoint.0.save_total_limit=1", train_iters]].concat());
    }
    assert_eq!(steps(&run, "hf/run.1"), [2, 4]);
    assert_eq!(steps(&run, "hf"), [8]);
    assert!(run.path().join("copy/epoch_0_global_step_4").exists(), "the copy is not the second run's to delete");
    // A moved folder belongs to the same run.
    fs::rename(run.path().join("copy"), run.path().join("moved")).unwrap();
    let moved = format!("checkpoint.0.output_dir={}", run.path().join("moved").display());
    run.train_ok(&[&exports[..], &[&moved, "train_iters=10"]].concat());
    assert_eq!((steps(&run, "hf"), run.path().join("hf/run.2").exists()), (vec![10], false));
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap).filter(|entry| entry.file_name() != "latest") {
        match entry.path().is_dir() {
            true => copy(&entry.path(), &to.join(entry.file_name())),
            false => drop(fs::copy(entry.path(), to.join(entry.file_name())).unwrap()),
        }
    }
}

#[test]
fn an_occupied_folder_is_an_error_before_the_first_step() {
    for name in ["hf/global_step_3/thesis.txt", "hf/global_step_3", "checkpoints/epoch_0_global_step_5"] {
        let run = Run::new();
        run.write_foreign(name);
        refused(&run, &["train_iters=5", "checkpoint.1.save_every_n_steps=3"], 6, &["will not be replaced"]);
        assert!(run.path().join(name).is_file(), "{name}");
    }
}

#[test]
fn an_export_never_replaces_the_model_in_use() {
    let run = Run::new();
    run.train_ok(&["train_iters=2"]);
    let model = format!("model={{name_or_path: {}, dtype: f32}}", run.export_folder().display());
    for more in
        [&["train_iters=2"][..], &["train_iters=3", "checkpoint.1.save_total_limit=1"], &["model.peft_config={r: 2}"]]
    {
        refused(&run, &[&[model.as_str()], more].concat(), 2, &["model.name_or_path", "could replace"]);
    }
    assert_eq!(steps(&run, "hf"), [2]);
}

#[test]
fn an_adapter_is_refused_on_other_base_weights() {
    let run = Run::new();
    run.train_ok(&["train_iters=1"]);
    let model = run.path().join("model");
    fs::rename(run.export_folder(), &model).unwrap();
    let key = format!("model={{name_or_path: {}, dtype: f32", model.display());
    let keys = ["train_iters=1", "checkpoint.0.auto_resume=false"];
    run.train_ok(&[&keys[..], &[&format!("{key}, peft_config: {{r: 2}}}}")]].concat());
    let adapter = run.path().join("adapter");
    fs::rename(run.export_folder(), &adapter).unwrap();
    let more = format!("{key}, adapter_name_or_path: {}}}", adapter.display());
    run.train_ok(&[&keys[..], &[&more]].concat());
    let weights = model.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    // Changes a bit in every 64 bytes, as training changes all weights a little.
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[data..].iter_mut().step_by(64).for_each(|byte| *byte ^= 1);
    fs::write(&weights, bytes).unwrap();
    let names = [model.to_str().unwrap(), adapter.to_str().unwrap(), "on other weights", BASE_MODEL_RECORD];
    refused(&run, &[&keys[..], &[&more]].concat(), 6, &names);
    fs::remove_file(adapter.join(BASE_MODEL_RECORD)).unwrap();
    run.train_ok(&[&keys[..], &[&more]].concat());
}

#[test]
fn two_runs_cannot_export_to_one_folder() {
    let run = Run::new();
    fs::create_dir_all(run.path().join("hf")).unwrap();
    let lock = File::create(run.path().join("hf/.lock")).unwrap();
    lock.try_lock().unwrap();
    refused(&run, &[], 6, &["another run is writing to", "hf"]);
}

#[test]
fn a_symlink_out_of_the_models_folder_is_not_exported() {
    let run = Run::new();
    run.train_ok(&["train_iters=1"]);
    let model = run.path().join("model");
    fs::rename(run.export_folder(), &model).unwrap();
    run.write("secret", "root:x");
    std::os::unix::fs::symlink(run.path().join("secret"), model.join("vocab.json")).unwrap();
    let key = format!("model={{name_or_path: {}, dtype: f32}}", model.display());
    // An export copies the files of the tokenizer.
    let tokenizer = format!("tokenizer.name_or_path={}", model.display());
    let overrides = [key.as_str(), &tokenizer, "checkpoint.0.auto_resume=false"];
    refused(&run, &overrides, 6, &["vocab.json", "outside of its folder"]);
    assert!(!run.has_exports());
}

#[test]
fn a_failed_write_of_metrics_has_the_exit_code_of_a_full_disk() {
    let run = Run::new();
    let output = run.train(&["train_iters=2", "train_log_metrics_path=/dev/full"]);
    assert_eq!(output.status.code(), Some(6), "{}", stderr(&output));
    assert!(stderr(&output).contains("write all metrics to /dev/full"), "{}", stderr(&output));
    assert_eq!(steps(&run, "hf"), [2]);
    assert_eq!(run.report()["exit"]["code"], 6);
}

#[test]
fn a_run_that_cannot_fit_is_refused() {
    let big = ["num_hidden_layers=4000", "hidden_size=8192", "intermediate_size=32768"]
        .map(|key| format!("model.config.{key}"));
    refused(
        &Run::new(),
        &big.each_ref().map(String::as_str),
        4,
        &["failed to start: the run needs", "trainer estimate"],
    );
}

#[test]
fn a_run_without_a_due_checkpoint_saves_its_last_step() {
    let run = Run::new();
    let entry = |every: usize| format!("checkpoint={{type: huggingface, output_dir: hf, save_every_n_steps: {every}}}");
    let output = run.train(&["train_iters=3", &entry(50)]);
    succeeds(&output, &["no checkpoint was due", "the model is in "]);
    assert_eq!(steps(&run, "hf"), [3]);

    let run = Run::new();
    succeeds(&run.train(&["train_iters=3", &entry(2)]), &["steps 3 to 3 are in no checkpoint"]);
    assert_eq!(steps(&run, "hf"), [2]);
}

#[test]
fn an_estimate_without_a_way_to_fit_names_the_other_methods() {
    let output = Run::new().command("estimate", &["model.config.hidden_size=8192"]).output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!table.contains("LoRA"), "{table}");
    let big = ["num_hidden_layers=4000", "hidden_size=8192", "intermediate_size=32768"];
    let big = big.map(|key| format!("model.config.{key}"));
    let output = Run::new().command("estimate", &big.each_ref().map(String::as_str)).output().unwrap();
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    for words in ["LoRA (`model.peft_config`)", "`model.quantize_base: fp8`"] {
        assert!(table.contains(words), "no {words:?} in:\n{table}");
    }
}

#[test]
fn resuming_with_other_data_names_the_file_and_both_fixes() {
    let run = Run::new();
    run.train_ok(&["exit_iteration=5"]);
    let rows = fs::read_to_string(run.path().join("train.jsonl")).unwrap();
    run.write("train.jsonl", &rows.replace("Yes.", "No."));
    let output = run.train(&[]);
    let said = stderr(&output);
    for words in ["the data changed: ", "train.jsonl. Restore", "another output_dir"] {
        assert!(said.contains(words), "no {words:?} in:\n{said}");
    }
}

#[test]
fn the_size_of_a_run_is_printed_before_the_first_step() {
    let run = Run::new();
    let sizes = [
        "2 steps, 0.10 epochs: 80 rows an epoch, 4 rows a step, 20 steps an epoch",
        "parameters: 51,360, trained: all",
    ];
    succeeds(&run.train(&["train_iters=2"]), &sizes);
    let output = run.command("preprocess", &["train_iters=2"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    sizes.iter().for_each(|words| assert!(text.contains(words), "no {words:?} in:\n{text}"));
    // Packing makes the epochs differ.
    let packed =
        ["data.pack_samples=true", "data.max_length=128", "micro_batch_size=1", "gradient_accumulation_steps=1"];
    for (horizon, epochs) in
        [(["train_iters=null", "epochs=3"], ", 3.00 epochs"), (["train_iters=200", "epochs=null"], ", about ")]
    {
        let output = run.command("preprocess", &[&packed[..], &horizon].concat()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let steps = text.lines().find(|line| line.contains(" epochs: ")).unwrap_or_else(|| panic!("{text}"));
        assert!(steps.contains(epochs) && steps.contains(" rows in epoch 0, 1 row a step, "), "{steps}");
    }
    let output = run.command("preprocess", &["micro_batch_size=100000"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("a step has 80 rows instead of 200,000: the data have no more"), "{text}");
}

#[test]
fn zero_gradients_are_counted_on_request() {
    let run = Run::new();
    run.train_ok(&["train_iters=1"]);
    assert!(run.metrics()[0].get("num_zeros").is_none());
    run.train_ok(&["train_iters=1", "log_num_zeros_in_grad=true", "model.config.tie_word_embeddings=false"]);
    // The embeddings of most tokens of the vocabulary get no gradient.
    assert!(run.metrics()[0]["num_zeros"].as_u64().unwrap() > 0);
}

/// The tests read the log through a pipe.
#[test]
fn the_lines_of_a_log_begin_with_their_time_and_the_last_one_names_the_next_command() {
    let run = Run::new();
    let log = stderr(&run.train(&["train_iters=2"]));
    let steps: Vec<&str> = log.lines().filter(|line| line.contains("Train iter: ")).collect();
    let times: Vec<jiff::Timestamp> =
        steps.iter().map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect();
    assert!(times.len() == 2 && times.is_sorted(), "{log}");
    let recorded = run.metrics().into_iter().filter(|record| record.get("loss").is_some());
    let recorded = recorded.map(|record| record["time"].as_str().unwrap().parse::<jiff::Timestamp>().unwrap());
    for (logged, recorded) in times.iter().zip(recorded) {
        assert!((logged.as_second() - recorded.as_second()).abs() <= 1, "{logged} and {recorded}");
    }
    let last = log.lines().last().unwrap();
    assert!(last.ends_with(&format!("try it: trainer chat {}", run.export_folder().display())), "{last}");
    let missing = run.command("train", &["data.sources=[none.jsonl]"]).env("CLICOLOR_FORCE", "1").output().unwrap();
    assert!(stderr(&missing).contains("\u{1b}[31merror:\u{1b}[0m "), "{}", stderr(&missing));
    let plain = run.command("train", &["data.sources=[none.jsonl]"]).output().unwrap();
    assert!(stderr(&plain).contains("\nerror: ") || stderr(&plain).starts_with("error: "), "{}", stderr(&plain));
}

#[test]
fn the_first_lines_of_a_log_name_model_and_device_and_one_device_has_no_mesh() {
    let log = stderr(&Run::new().train(&["train_iters=1", "micro_batch_size=1", "gradient_accumulation_steps=1"]));
    let at = |words: &str| log.find(words).unwrap_or_else(|| panic!("no {words:?} in:\n{log}"));
    let places = ["model: Llama, with new weights", "device: cpu", "reads as", "1 step, ", "Train iter: 1/1"].map(at);
    assert!(places.is_sorted(), "{log}");
    assert!(!log.contains("mesh:") && log.contains("1 row a step") && !log.contains("1 rows"), "{log}");
}
